"""`normlab export`: the run's own numbers and text in a fresh process; all of it or nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import normlab
from normlab import DecoderConfig, NormLabError, TrainConfig
from normlab.cli import main
from normlab.hf import export
from normlab.train.trainer import train

TEXT = "".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(400))
TEXTS = ["", " ", "line", "naïve ☃ 𝄞", "\x00\t\r\n", "spelt out: <|endoftext|>!", "x" * 300]
KINDS = {
    "bytes": {}, "bpe": {"tokenizer": "bpe:300"}, "ngpt": {"scheme": "ngpt"}, "carried": {"base_dim": 16},
    "shallower": {"scheme": "pre", "base_depth": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """One small finished run of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMLAB_CACHE", str(folder / "cache"))
        for name, changes in KINDS.items():
            model = DecoderConfig(depth=1, dim=32, heads=2, scheme=changes.get("scheme", "geonorm"))
            rest = {key: value for key, value in changes.items() if key != "scheme"}
            config = TrainConfig(
                model=model, data=(str(folder / "text.txt"),), length=32, batch=4, tokens=8192, lr=1e-2, evals=1,
                saves=0, **rest,
            )  # fmt: skip
            assert train(config, folder / name, progress=False).state == "done"
    return {name: folder / name for name in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_run(kind, runs, tmp_path):
    run, folder = normlab.load_run(runs[kind]), export(runs[kind], tmp_path / "out")
    model, words = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = words(text)["input_ids"]
        assert ids == [run.tokenizer.end, *run.tokenizer.encode(text).tolist()]
        assert words.decode(ids, skip_special_tokens=True) == text
    ids = words("line 1: the", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, run.model(ids))
    writer = pipeline("text-generation", model=model, tokenizer=words)
    found = writer("line 1: the", max_new_tokens=20, do_sample=False)[0]["generated_text"]
    assert found == run.generate("line 1: the", tokens=20, temperature=0)
    assert found != "line 1: the"


def test_bytes_that_break_off_spoil_nothing_but_themselves(runs, tmp_path):
    words = AutoTokenizer.from_pretrained(export(runs["bytes"], tmp_path / "out"))
    assert words.decode([0x61, 0xC3, 0x28, 0xFF, 0x62]) == bytes([0x61, 0xC3, 0x28, 0xFF, 0x62]).decode(
        "utf-8", "replace"
    )


def test_batches_are_padded_on_the_left(runs, tmp_path):
    folder = export(runs["bytes"], tmp_path / "out")
    writer = pipeline("text-generation", model=str(folder))
    prompts = ["line 1: the quick", "lin"]
    together = writer(prompts, max_new_tokens=8, do_sample=False, batch_size=2)
    alone = [writer(prompt, max_new_tokens=8, do_sample=False) for prompt in prompts]
    assert together == alone


@pytest.mark.full
def test_the_command_writes_what_a_fresh_process_loads(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["normlab", "export", str(runs["ngpt"]), str(tmp_path / "out")])
    main.main()
    assert capsys.readouterr().out == f"model: {tmp_path / 'out'}\n"
    code = (
        "import sys, normlab.hf\n"
        "from transformers import pipeline\n"
        "write = pipeline('text-generation', sys.argv[1])\n"
        "print(ascii(write('line 7', max_new_tokens=12, do_sample=False)[0]['generated_text']))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    expected = normlab.load_run(runs["ngpt"]).generate("line 7", tokens=12, temperature=0)
    assert found.stdout.strip() == ascii(expected)
    with pytest.raises(SystemExit) as refused:
        main.main()
    assert refused.value.code == 2
    advice = "add --overwrite to replace it, or choose another folder"
    assert capsys.readouterr().err == f"normlab: {tmp_path / 'out'} holds an export already; {advice}\n"


def test_what_is_in_the_folder(runs, tmp_path):
    folder = export(runs["bytes"], tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    ends = json.loads((folder / "generation_config.json").read_text())
    assert (ends["bos_token_id"], ends["eos_token_id"], ends["pad_token_id"]) == (256, 256, 256)


def test_the_card_tells_the_run(runs, tmp_path):
    card = (export(runs["bytes"], tmp_path / "out") / "README.md").read_text()
    result = normlab.load_run(runs["bytes"]).status["result"]
    assert card.startswith('---\nlibrary_name: "transformers"\n')
    for line in (
        "| Scheme | geonorm |", "| Tokenizer | bytes |", "| Tokens | 8.19k |",
        f"| Bits per byte | {result['bits_per_byte']:.4f} |",
        f"| Validation loss (nats a token) | {result['loss']:.4f} |", f"torch {torch.__version__}".replace("_", "\\_"),
    ):  # fmt: skip
        assert line in card


def test_names_in_the_card_are_text(runs, tmp_path):
    run = normlab.load_run(runs["bytes"])
    run.config = run.config.from_dict({**run.config.to_dict(), "data": ["<script>|`*x*`\n# y"]})
    card = (export(run, tmp_path / "out") / "README.md").read_text()
    assert "| Data | &lt;script&gt;\\|\\`\\*x\\*\\` \\# y |" in card


def test_an_earlier_export_gives_way_when_told_so(runs, tmp_path):
    folder = export(runs["bytes"], tmp_path / "out")
    (folder / "stale.txt").write_text("old")
    with pytest.raises(NormLabError, match="--overwrite"):
        export(runs["ngpt"], folder)
    assert AutoModelForCausalLM.from_pretrained(folder).decoder.config.scheme.name == "geonorm"
    export(runs["ngpt"], folder, overwrite=True)
    assert AutoModelForCausalLM.from_pretrained(folder).decoder.config.scheme.name == "ngpt"
    assert not (folder / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_else_is_ever_replaced(runs, tmp_path, overwrite):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for target in (tmp_path / "mine", tmp_path / "file", runs["bytes"]):
        with pytest.raises(NormLabError, match="did not write"):
            export(runs["bytes"], target, overwrite=overwrite)
    with pytest.raises(NormLabError, match="is not a folder; make it first"):
        export(runs["bytes"], tmp_path / "no" / "out", overwrite=overwrite)
    assert (tmp_path / "mine" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    assert (export(runs["bytes"], tmp_path / "empty", overwrite=overwrite) / "config.json").is_file()


@pytest.mark.parametrize("there", [False, True])
def test_a_failure_leaves_all_as_it_was(runs, tmp_path, monkeypatch, there):
    folder = tmp_path / "out"
    if there:
        export(runs["bytes"], folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()} if there else None

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("normlab.hf.exporting.export.write_atomically", full)
    with pytest.raises(NormLabError, match="free some space"):
        export(runs["ngpt"], folder, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if there else [])
    assert not there or {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_run_without_weights_says_so(runs, tmp_path):
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (unfinished / name).write_bytes((runs["bytes"] / name).read_bytes())
    with pytest.raises(NormLabError, match="has no weights and no checkpoint yet"):
        export(unfinished, tmp_path / "out")
    with pytest.raises(NormLabError, match="is not a run"):
        export(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_without_the_library_one_line_says_what_to_install(runs, tmp_path):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "sys.argv = ['normlab', 'export', *sys.argv[1:]]\n"
        "from normlab.cli import main; main.main()"
    )
    arguments = [str(runs["bytes"]), str(tmp_path / "out")]
    found = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stderr == 'normlab: normlab.hf needs transformers, which is missing; try: pip install "normlab[hf]"\n'
