"""`normlab eval --tasks` with lm-evaluation-harness: an offline task scored by hand, stop and go on, errors."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import normlab
from normlab import DecoderConfig, TrainConfig
from normlab.hf import export
from normlab.train.trainer import train

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason='needs lm_eval: pip install "normlab[eval]"'
    ),
]

TEXT = "".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(100))
WORDS = TEXT.splitlines()[0].split()
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{template}"
doc_to_target: answer
doc_to_choice: "{{{{ends}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def questions() -> list[dict]:
    """Which word follows? The right one is at a place that turns, among longer and shorter ones."""
    ends = [" fox", " jumps", " the", " green horses", " lazy", " a"]
    made = []
    for number, (start, right) in enumerate(itertools.pairwise(WORDS[2:])):
        wrong = [end for end in ends if end.strip() != right][:3]
        place = number % 4
        made.append({"start": start, "ends": [*wrong[:place], f" {right}", *wrong[place:]], "answer": place})
    return made


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    (folder / "a.txt").write_text(TEXT)
    config = TrainConfig(
        model=DecoderConfig(depth=1, dim=32, heads=2, scheme="geonorm", max_length=64), data=(str(folder / "a.txt"),),
        length=64, batch=4, tokens=8192, lr=1e-2, evals=1, saves=0,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMLAB_CACHE", str(folder / "cache"))
        assert train(config, folder / "run", progress=False).state == "done"
    export(folder / "run", folder / "out")
    (folder / "tasks").mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions()))
    templates = {"cloze": "{{start}}", "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}
    for name, template in templates.items():
        text = TASK.format(name=name, data=folder / "data.jsonl", template=template)
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    return folder


def run(places: Path, *words: str) -> subprocess.CompletedProcess[str]:
    offline = {"HF_HOME": str(places / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    line = [sys.executable, "-m", "normlab", "eval", *words, "--device", "cpu"]
    return subprocess.run(line, env={**os.environ, **offline}, capture_output=True, text=True, check=False)


@torch.no_grad()
def log_likelihoods(run, question: dict) -> list[float]:
    words, found = run.tokenizer, []
    for end in question["ends"]:
        start, rest = words.encode(question["start"]).tolist(), words.encode(end).tolist()
        ids = torch.tensor([[words.end, *start, *rest]])
        chances = run.model(ids).log_softmax(-1)[0, -len(rest) - 1 : -1]
        found.append(float(chances.gather(-1, ids[0, -len(rest) :, None]).sum()))
    return found


def test_a_task_is_scored_as_by_hand_and_only_once(places, tmp_path):
    words = (str(places / "run"), str(places / "out"), "--task-files", str(places / "tasks" / "cloze.yaml"))
    out = tmp_path / "e.json"
    found = run(places, *words, "--out", str(out))
    assert found.returncode == 0, found.stderr
    loaded = normlab.load_run(places / "run")
    plain, normed = [], []
    for question in questions():
        chances = np.array(log_likelihoods(loaded, question))
        plain.append(float(chances.argmax() == question["answer"]))
        lengths = [len(end) for end in question["ends"]]
        normed.append(float((chances / lengths).argmax() == question["answer"]))
    # A model that is always right or always wrong would agree with anything.
    assert 0 < np.mean(plain) < 1
    for row in json.loads(out.read_text())["results"]:
        scores = {score["metric"]: score for score in row["scores"]}
        for name, right in (("acc", plain), ("acc_norm", normed)):
            assert scores[name]["value"] == pytest.approx(np.mean(right))
            assert scores[name]["stderr"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(len(right)))
            assert scores[name]["samples"] == len(right)
    before = out.read_bytes()
    again = run(places, *words, "--out", str(out))
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("done before") == 2
    assert again.stdout == found.stdout
    assert out.read_bytes() == before
    fewer = run(places, words[0], *words[2:], "--limit", "3", "--out", str(out))
    assert fewer.returncode == 0, fewer.stderr
    assert [row["scores"][0]["samples"] for row in json.loads(out.read_text())["results"]] == [8, 8, 3]


def test_a_folder_of_tasks_and_a_template_that_reaches_for_python(places, tmp_path):
    words = (str(places / "run"), "--task-files", str(places / "tasks"), "--out", str(tmp_path / "e.json"))
    found = run(places, *words, "--tasks", "cloze,escape", "--limit", "2")
    assert found.returncode == 2
    assert found.stderr.splitlines()[-1].startswith("normlab: task escape failed (SecurityError")
    # What came before is stored.
    assert [row["task"] for row in json.loads((tmp_path / "e.json").read_text())["results"]] == ["cloze"]


def test_names_are_suggested_and_a_missing_network_is_said(places, tmp_path):
    out = ("--out", str(tmp_path / "e.json"))
    found = run(places, str(places / "run"), "--tasks", "helaswag", *out)
    assert found.returncode == 2
    assert "unknown task 'helaswag'; did you mean 'hellaswag'" in found.stderr
    found = run(places, str(places / "run"), "--tasks", "hellaswag", *out)
    assert found.returncode == 2
    assert "task hellaswag needs data from the Hugging Face hub, which cannot be reached" in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "e.json").exists()
