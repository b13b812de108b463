"""`normlab eval --bits` on runs and exports: equal scores, stop and go on, one line for a mistake."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from normlab import DecoderConfig, NormLabError, TrainConfig
from normlab.evaluation import EvaluationConfig, evaluate
from normlab.evaluation.bits import Text
from normlab.evaluation.harness import _unknown, scores
from normlab.evaluation.subject import open_subject
from normlab.hf import export
from normlab.train.trainer import train
from tests.command import normlab

TEXT = "the quick brown fox jumps over the lazy dog\n" * 20


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """A folder with a run, its export and two texts."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "a.txt").write_text(TEXT)
    (folder / "b.txt").write_text(TEXT[::-1])
    config = TrainConfig(
        model=DecoderConfig(depth=1, dim=16, heads=2, scheme="geonorm", max_length=32), data=(str(folder / "a.txt"),),
        length=32, batch=2, tokens=256, evals=1, saves=0,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMLAB_CACHE", str(folder / "cache"))
        assert train(config, folder / "run", progress=False).state == "done"
    export(folder / "run", folder / "out")
    return folder


def test_a_run_and_its_export_have_one_score(places, tmp_path):
    longest = json.loads((places / "out" / "config.json").read_text())["model"]["max_length"]
    sizes = ("--length", "32", "--stride", "32")
    assert longest >= 32
    found = normlab(
        "eval", str(places / "run"), str(places / "out"), "--bits", str(places / "a.txt"), *sizes,
        "--out", str(tmp_path / "e.json"), "--device", "cpu",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "bits_per_byte" in found.stdout
    first, second = json.loads((tmp_path / "e.json").read_text())["results"]
    # Kernels may add in another order: float32 sums of a few dozen terms.
    assert first["scores"][0]["value"] == pytest.approx(second["scores"][0]["value"], rel=1e-5)
    assert first["weights"] != second["weights"]
    assert first["command"][:2] == ["normlab", "eval"]
    assert {"normlab", "torch", "python"} <= set(first["versions"])
    assert first["settings"]["stride"] == 32
    assert first["date"]


def test_what_was_stopped_goes_on(places, tmp_path, monkeypatch):
    texts = (str(places / "a.txt"), str(places / "b.txt"))
    config = EvaluationConfig(runs=(str(places / "run"),), bits=texts, device="cpu")
    whole, asked = Text.evaluate, []

    def stopping(self, subject, *, progress):
        asked.append(self.name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return whole(self, subject, progress=progress)

    monkeypatch.setattr(Text, "evaluate", stopping)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config, tmp_path / "e.json", progress=False)
    assert len(json.loads((tmp_path / "e.json").read_text())["results"]) == 1
    rows = evaluate(config, tmp_path / "e.json", progress=False)
    assert asked == [texts[0], texts[1], texts[1]]
    assert evaluate(config, tmp_path / "e.json", progress=False) == rows
    assert len(asked) == 3
    # The reversed text is new to the model.
    assert rows[1]["scores"][0]["value"] > rows[0]["scores"][0]["value"]
    # Other settings or another text under the same name are another question.
    other = EvaluationConfig(runs=config.runs, bits=texts[:1], stride=3, device="cpu")
    evaluate(other, tmp_path / "e.json", progress=False)
    assert len(asked) == 4
    assert len(json.loads((tmp_path / "e.json").read_text())["results"]) == 3


def test_a_missing_extra_is_named(places, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    config = EvaluationConfig(runs=(str(places / "run"),), tasks=("arc_easy",), device="cpu")
    with pytest.raises(NormLabError, match=r'needs lm_eval.*pip install "normlab\[eval\]"'):
        evaluate(config, tmp_path / "e.json", progress=False)
    assert not (tmp_path / "e.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no run given"),
        (("{run}",), "nothing to evaluate on"),
        (("{run}x", "--bits", "{text}"), "does not exist; expected a folder made by normlab train"),
        (("{folder}", "--bits", "{text}"), "is neither a run nor an export"),
        (("{run}", "--bits", "{text}x"), "a.txtx"),
        (("{run}", "--bits", "{text}", "--stride", "99"), "would leave out tokens"),
        (("{run}", "--bits", "{text}", "--length", "9999"), "tokens at most"),
        (("{run}", "--bits", "{text}", "--batch", "0"), "batch must be at least 1"),
        (("{run}", "--bits", "{text}", "--out", "{text}"), "must end in .json"),
        (("{run}", "--bits", "{text}", "--out", "{run}/config.json"), "did not write; choose another --out"),
    ],
)
def test_a_mistake_is_one_line(places, words, message, tmp_path):
    names = {"run": places / "run", "folder": places, "text": places / "a.txt"}
    out = () if "--out" in words else ("--out", str(tmp_path / "e.json"))
    found = normlab("eval", *(word.format(**names) for word in words), *out)
    assert found.returncode == 2
    assert message in found.stderr
    assert found.stderr.count("\n") == 1
    assert not (tmp_path / "e.json").exists()


def test_an_export_that_lacks_weights_has_no_score(places, tmp_path):
    shutil.copytree(places / "out", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    weights = load_file(file)
    name = "decoder.stack.layers.0.branches.0.qkv.weight"
    save_file({key: value for key, value in weights.items() if key != name}, file, metadata={"format": "pt"})
    with pytest.raises(NormLabError, match=rf"lacks one weight \(the first is {name}\)"):
        _ = open_subject(tmp_path / "out", "cpu").decoder


def test_an_unknown_task_comes_with_the_nearest():
    assert "did you mean 'hellaswag'?" in str(_unknown("helaswag", {"hellaswag", "arc_easy"}))
    assert "did you mean" not in str(_unknown("zzz", {"hellaswag", "arc_easy"}))


def test_scores_are_read_with_their_errors():
    values = {"alias": "t", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 0.2, "f1_stderr,strict": "N/A"}
    found = scores({"results": {"t": values}, "n-samples": {"t": {"original": 9, "effective": 4}}})
    assert [(one.metric, one.value, one.stderr, one.samples) for one in found] == [
        ("acc", 0.5, 0.1, 4), ("f1 (strict)", 0.2, None, 4),
    ]  # fmt: skip


def test_help_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['normlab', 'eval', '--help']\n"
        "from normlab.cli import main\n"
        "try: main.main()\n"
        "except SystemExit as stop: assert stop.code in (0, None)\n"
        "assert 'torch' not in sys.modules and 'lm_eval' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
