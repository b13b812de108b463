"""Small runs for tests of the training loop, what they are compared by, and ways to disturb them."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from normlab.cli import main
from normlab.data import Batch, Loader
from normlab.models.config import DecoderConfig
from normlab.train.config import TrainConfig
from normlab.train.storage.sinks import read_records
from normlab.train.trainer import Trainer

STEPS = 20
MODEL: dict[str, Any] = {"scheme": "peri", "depth": 2, "dim": 32, "heads": 4, "hidden": 48}
RUN: dict[str, Any] = {
    "length": 32, "batch": 4, "evals": 4, "saves": 5, "eval_tokens": 400, "val_fraction": 0.05, "lr": 3e-3,
    "device": "cpu",
}  # fmt: skip
# Times and speeds differ from run to run; everything else must not.
MEASURED = ("tokens_per_s", "mfu", "seconds", "waited", "memory_bytes")

MARK = 300
"""A token that no text has: the vocabulary of bytes is padded beyond it."""


def write_text(path: Path, words: int = 6000) -> Path:
    """Words of a small language: letters follow from the letters before them, words do not."""
    made = random.Random(0)
    language = ["".join(made.choices("abcdefghijklmnop", k=made.randint(3, 7))) for _ in range(40)]
    path.write_text(" ".join(made.choices(language, k=words)))
    return path


def config_of(text: Path, *, steps: int = STEPS, model: dict[str, Any] | None = None, **changes: Any) -> TrainConfig:
    fields = RUN | changes
    tokens = steps * fields["batch"] * fields["length"]
    return TrainConfig(model=DecoderConfig(**(MODEL | (model or {}))), data=(str(text),), tokens=tokens, **fields)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Every record but events, without what was measured by a clock."""
    records = [record for record in read_records(folder / "metrics.jsonl") if record["kind"] != "event"]
    return [{name: value for name, value in record.items() if name not in MEASURED} for record in records]


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    records = [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "event"]
    return [record for record in records if not kinds or record["what"] in kinds]


def losses(folder: Path, kind: str = "step") -> list[float]:
    return [record["loss"] for record in numbers(folder) if record["kind"] == kind]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def same_run(found: Path, expected: Path) -> None:
    """Bit for bit: every number of every record, and every weight."""
    assert numbers(found) == numbers(expected)
    same_tensors(weights(found), weights(expected))


def left_behind(folder: Path) -> list[str]:
    """What was begun and never finished."""
    return [str(path) for path in folder.rglob("*") if path.name.endswith((".part", ".partial", ".old"))]


def normlab_train(monkeypatch, *words: str) -> int:
    """The exit code of `normlab train` with these words."""
    monkeypatch.setattr(sys, "argv", ["normlab", "train", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


# -- disturbances --------------------------------------------------------------------------------------------------


def after_building(monkeypatch, *changes) -> None:
    """Have every trainer changed as soon as it is built."""
    build = Trainer.__init__

    def built(self: Trainer, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        for change in changes:
            change(self)

    monkeypatch.setattr(Trainer, "__init__", built)


def asks_to_stop(step: int):
    """As a signal that comes while `step` is under way."""

    def change(trainer: Trainer) -> None:
        go = trainer._gradient

        def gradient(parts):
            if trainer.step == step - 1:
                trainer.interrupt.reason = "asked by a test"
            return go(parts)

        trainer._gradient = gradient

    return change


class RecordedEagerly:
    """A graph that calls the recorded function at every replay: for tests of all but the recording."""

    def __init__(self, work: Callable[[], None], pool: Any = None):
        self.replay = work


def records_graphs(trainer: Trainer) -> None:
    """Steps are recorded and replayed as on a GPU, but a replay calls what was recorded."""
    trainer.graphs.record = RecordedEagerly


class Marking:
    """A loader that marks the batches of some steps, and only those of one rank if it is named."""

    def __init__(self, loader: Loader, trainer: Trainer, steps: set[int]):
        self.loader, self.trainer, self.steps = loader, trainer, steps

    def __next__(self) -> Batch:
        done = self.loader.state_dict()["sequence"] // self.trainer.config.batch
        batch = next(self.loader)
        if done + 1 in self.steps:
            batch.inputs[0, 0] = MARK
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def spoils(steps: set[int], *, rank: int = 0, value: float = math.nan, layer: int = 1):
    """The batches of these steps make a layer return `value`, whoever runs them."""

    def change(trainer: Trainer) -> None:
        marked = False

        def listen(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            nonlocal marked
            marked = bool((args[0] == MARK).any())

        def spoil(_module: Any, _args: Any, state: torch.Tensor) -> torch.Tensor:
            return state * value if marked else state

        trainer.model.embedding.register_forward_pre_hook(listen)
        trainer.model.stack.layers[layer].register_forward_hook(spoil)
        if trainer.group.rank == rank:
            trainer.loader = Marking(trainer.loader, trainer, steps)  # type: ignore[assignment]

    return change


def spikes(steps: set[int], factor: float = 10.0):
    """The batches of these steps have a loss so many times too large."""

    def change(trainer: Trainer) -> None:
        loss = trainer.loss
        trainer.loader = Marking(trainer.loader, trainer, steps)  # type: ignore[assignment]
        trainer.loss = lambda inputs, *args, **options: (
            loss(inputs, *args, **options) * (factor if bool((inputs == MARK).any()) else 1.0)
        )

    return change
