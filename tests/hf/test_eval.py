"""lm-evaluation-harness on an exported run, with a task that lies beside this file."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import normlab
from normlab import DecoderConfig, TrainConfig
from normlab.hf import export
from normlab.train.trainer import train
from tests.hf.test_export import TEXT

ROOT = Path(__file__).parents[2]
TASK = ROOT / "tests" / "hf" / "task"

EVALUATE = """
import json, sys
import normlab.hf
import lm_eval
from lm_eval.tasks import TaskManager
found = lm_eval.simple_evaluate(
    model="hf",
    model_args={"pretrained": sys.argv[1], "device": "cpu", "dtype": "float32"},
    tasks=["normlab_fox"],
    task_manager=TaskManager(include_path=sys.argv[2], include_defaults=False),
    batch_size=4,
)
samples = sorted(found["samples"]["normlab_fox"], key=lambda sample: sample["doc_id"])
scores = [[float(choice[0][0]) for choice in sample["resps"]] for sample in samples]
print(json.dumps({"accuracy": found["results"]["normlab_fox"]["acc,none"], "scores": scores}))
"""


def own_scores(run) -> list[list[float]]:
    """Log-likelihoods of every choice, from the run's own model and tokenizer."""
    questions = [json.loads(line) for line in (TASK / "fox.jsonl").read_text().splitlines()]
    return [[_log_likelihood(run, question["start"], end) for end in question["ends"]] for question in questions]


@torch.no_grad()
def _log_likelihood(run, start: str, end: str) -> float:
    words = run.tokenizer
    # A text begins after the end of another: the exported tokenizer says so to the harness, too.
    ids = torch.tensor([[words.end, *words.encode(start), *words.encode(end)]], dtype=torch.long)
    length = len(words.encode(end))
    chances = run.model(ids).log_softmax(-1)[0, -length - 1 : -1]
    return float(chances.gather(-1, ids[0, -length:, None]).sum())


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason='needs lm_eval: pip install "normlab[eval]"')
def test_the_harness_scores_as_the_run_does(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    config = TrainConfig(
        model=DecoderConfig(depth=2, dim=64, heads=2, scheme="geonorm"), data=(str(tmp_path / "text.txt"),), length=64,
        batch=8, tokens=100_000, lr=5e-3, evals=1, saves=0,
    )  # fmt: skip
    assert train(config, tmp_path / "run", progress=False).state == "done"
    folder = export(tmp_path / "run", tmp_path / "out")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", EVALUATE, str(folder), str(TASK)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    expected = own_scores(normlab.load_run(tmp_path / "run"))
    # Padded in batches there, alone here: the same sums in another order.
    torch.testing.assert_close(torch.tensor(found["scores"]), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert found["accuracy"] == 1.0
