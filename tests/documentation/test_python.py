"""Every Python block of the README and the guides compiles; those that no other test runs are run here, made small.

tests/hf runs the blocks of its two guides; tests/test_examples.py finds those of docs/guides/elsewhere.md in examples.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normlab
from normlab.train.trainer import train
from tests.documentation.commands import ROOT, blocks, pages

SCRIPTS = {"ladder.md"}
"""Pages whose program starts processes, which import it again: it is run as a reader would, from a file."""
ELSEWHERE = {"converting.md", "elsewhere.md", "hugging-face.md"}
SMALLER = {
    "README.md": [
        ('"125m", ', '"125m", depth=2, dim=32, heads=2, kv_heads=2, hidden=64, vocab_size=64, max_length=256, '),
        ("prompt, 100", "prompt, 4"),
        ("dim=768", "dim=32"),
    ],
    "checking.md": [
        ("depths=(12, 24), seeds=3", 'depths=(2, 4), seeds=1, steps=2, start_size="none"'),
        ("at(24,", "at(4,"),
        ('open("check.json").read()', "report.to_json()"),
    ],
    "ladder.md": [
        ("length=128, batch=16", "length=32, batch=4, eval_tokens=1024, evals=1, saves=0"),
        ('"2x64", "4x64"', '"1x16", "2x16"'),
        ("(1_000_000,)", "(2048,), lrs=(1e-2,), seeds=1, head_width=16, warmup_steps=2, workers=1"),
    ],
    "simulating.md": [
        ("tokens=64, dim=3, beta=4.0, seeds=4", "tokens=8, dim=3, beta=4.0, seeds=2, time=2.0"),
        ("tokens=48, dim=32", "tokens=8, dim=8"),
    ],
    "training.md": [
        ("...,", "**small, "),
        ("warmup=100, tokens=118_000_000", "warmup=2, tokens=6144"),
        ("branches=(29_500_000, 59_000_000)", "branches=(2048, 4096)"),
        ("29_500_000", "2048"),
        ("tokens=100", "tokens=4"),
    ],
}
"""Page → what is put in the place of what, so that it takes seconds; every one must be found."""


class Mixer(nn.Module):
    """A sublayer with one matrix, whose name says its role."""

    def __init__(self, name: str, dim: int = 32):
        super().__init__()
        self.add_module(name, nn.Linear(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(self.children())(x)


def readme_names() -> dict[str, Any]:
    """What the README's blocks leave to the reader."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sublayers = [(Mixer("o_proj"), Mixer("down_proj")) for _ in range(2)]
    tokens = torch.arange(16)[None]
    return {
        "your_sublayers": sublayers,
        "embeddings": torch.randn(1, 4, 32),
        "what_your_attention_takes": {},
        "tokens": tokens,
        "loss_of": lambda hidden: hidden.square().mean(),
        "targets": tokens,
        "prompt": tokens,
        "llama": LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=2)),
    }


def checking_names() -> dict[str, Any]:
    model = normlab.Decoder(normlab.DecoderConfig(depth=2, dim=32, heads=2, vocab_size=64, max_length=32))
    batches = [torch.randint(0, 64, (2, 16)) for _ in range(2)]
    return {
        "normlab": normlab, "model": model, "batches": batches,
        "optimiser": torch.optim.SGD(model.parameters(), lr=1e-3),
        "loss_of": lambda logits: logits.square().mean(),
    }  # fmt: skip


def training_names() -> dict[str, Any]:
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    model = normlab.DecoderConfig(depth=1, dim=32, heads=2)
    small = {"model": model, "data": ("text.txt",), "length": 32, "batch": 4, "evals": 1, "eval_tokens": 1024}
    train(normlab.TrainConfig(**small, saves=0, tokens=1024), Path("runs/books"), progress=False)
    return {"small": small, "normlab": normlab, "TrainConfig": normlab.TrainConfig, "train": train, "Path": Path}


def evaluating_names() -> dict[str, Any]:
    """A run and a text, under the names of the guide."""
    Path("book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    model = normlab.DecoderConfig(depth=1, dim=32, heads=2)
    small = {"model": model, "data": ("book.txt",), "length": 32, "batch": 4, "evals": 1, "eval_tokens": 1024}
    train(normlab.TrainConfig(**small, saves=0, tokens=1024), Path("runs/fox"), progress=False)
    return {}


NAMES = {
    "README.md": readme_names, "checking.md": checking_names, "evaluating.md": evaluating_names,
    "training.md": training_names,
}  # fmt: skip
SHOWN = [page for page in pages() if blocks(page, "python")]


def test_every_block_compiles():
    for page in SHOWN:
        for block in blocks(page, "python"):
            compile(re.sub(r"^( *)\.\.\.$", r"\1pass", block, flags=re.MULTILINE), str(page), "exec")
    assert {"README.md", "start.md", "training.md"} <= {page.name for page in SHOWN}


def small_program(page: Path) -> str:
    """All blocks of a page as one program, with settings that take seconds."""
    program = "\n".join(blocks(page, "python"))
    for before, after in SMALLER.get(page.name, []):
        assert before in program, f"{page.name} no longer has {before!r}"
        program = program.replace(before, after)
    return program


def run_blocks(page: Path) -> None:
    program = small_program(page)
    if page.name == "README.md":
        # The last block is about a model of another library.
        program = program.replace(
            "normlab.hf.identify(model)", "import normlab.hf; model = llama; normlab.hf.identify(model)"
        )
    names = NAMES.get(page.name, dict)()
    exec(compile(program, str(page), "exec"), names)


def test_the_first_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_blocks(ROOT / "docs" / "start.md")
    assert capsys.readouterr().out.startswith("[1.0")


@pytest.mark.full
@pytest.mark.parametrize(
    "page", [page for page in SHOWN if page.name not in ELSEWHERE | SCRIPTS | {"start.md"}], ids=lambda page: page.stem
)
def test_its_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    run_blocks(page)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_its_program_runs_as_a_script(name, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(small_program(ROOT / "docs" / "guides" / name))
    surroundings = {**os.environ, "NORMLAB_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=surroundings, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("peri: ")
    # Once: a process of a run that began the ladder again would print it again, or fail.
    assert len(done.stdout.splitlines()) == 1
