"""Whole training steps: tokens a second and memory of every scheme, beside Pre-Norm's, repeats interleaved."""

from __future__ import annotations

import gc
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from normlab.bench.timing import measure
from normlab.models import Decoder, DecoderConfig


@dataclass(frozen=True)
class StepRow:
    """One scheme with one kind of kernels."""

    scheme: str
    kernels: str
    tokens_per_second: list[float]
    peak_bytes: int

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"median": self.median}


class Contender:
    """A model in training that can be timed again and again."""

    def __init__(self, config: DecoderConfig, batch: int, length: int, device: torch.device):
        torch.manual_seed(0)
        self.device, self.tokens = device, batch * length
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self.model = Decoder(config, device=device)
        self.loss = torch.compile(self.model.loss, fullgraph=True)
        self.optimiser = torch.optim.AdamW(self.model.param_groups(lr=6e-4, weight_decay=0.1), fused=True)
        self.batch = torch.randint(0, config.vocab_size, (batch, length + 1), device=device)
        for _ in range(3):
            self.step()
        torch.cuda.reset_peak_memory_stats(device)
        self.step()
        self.peak = torch.cuda.max_memory_allocated(device) - before

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.loss(self.batch[:, :-1], self.batch[:, 1:])
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.model.after_step()

    def rate(self) -> float:
        return self.tokens / measure(self.step, self.device, repeats=5, warmup=1).median


def compare(
    schemes: list[tuple[str, str]], *, preset: str, batch: int, length: int, stream: str, repeats: int = 5
) -> list[StepRow]:
    """Every (scheme, kernels) built once, then timed in turns, so that a drifting clock hits all alike."""
    device = torch.device("cuda")
    contenders: dict[tuple[str, str], Contender] = {}
    for scheme, kernels in schemes:
        torch._dynamo.reset()
        config = DecoderConfig.preset(preset, scheme=scheme, kernels=kernels, stream=stream, max_length=length)
        contenders[scheme, kernels] = Contender(config, batch, length, device)
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in contenders}
    for _ in range(repeats):
        for key, contender in contenders.items():
            rates[key].append(contender.rate())
    return [StepRow(*key, rates[key], contender.peak) for key, contender in contenders.items()]
