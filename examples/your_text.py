"""Text that every machine has, for the examples: the source of a module of Python's standard library, byte by byte."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes()))


def batches(steps: int, size: int = 16, length: int = 64) -> Iterator[torch.Tensor]:
    """The same batches in every example: `size` pieces of the text, a token longer than what a model reads."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(TEXT) - length, (size, 1), generator=generator)
        yield TEXT[starts + torch.arange(length + 1)]


def report(scheme: str, losses: list[float]) -> None:
    print(f"{scheme}: loss {losses[0]:.2f} → {losses[-1]:.2f} nats a byte")


if __name__ == "__main__":
    print(bytes(next(batches(1))[0].tolist()).decode(errors="replace"))
