"""The kernels around the norms, each alone: parity, then time against the copy bandwidth and torch.compile.

    python benchmarks/model_kernels.py --out results/model-kernels.json
    python benchmarks/model_kernels.py --tune

Sizes are those of a 125m model's step of 32 x 1024 tokens. Without a GPU, `TRITON_INTERPRET=1` checks parity on small
ones; the times then mean nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import tyro
from torch import Tensor

from normlab.bench.facts import dated
from normlab.bench.timing import copy_bandwidth, measure
from normlab.errors import NormLabError
from normlab.kernels import backends, cross_entropy_gradient, rotary, swiglu
from normlab.models.rotary import rotary_table
from normlab.utils.files import write_json

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BATCH, LENGTH, HEADS, HEAD_DIM, HIDDEN, ROWS, VOCABULARY = (
    (32, 1024, 12, 64, 2048, 4096, 50304) if ON_GPU else (2, 24, 6, 16, 40, 16, 1000)
)

Outputs = Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to do besides timing the kernels as they are."""

    tune: bool = False
    """Try other launch settings and print the best."""
    out: Path | None = None
    """Where the figures go, as JSON."""


@dataclass(frozen=True)
class Case:
    """One kernel on inputs of its own."""

    name: str
    fused: Callable[[], Outputs]
    reference: Callable[[], Outputs]
    bytes_moved: int
    """By a perfect kernel."""
    settings: dict[str, tuple[int, ...]]
    """What there is to tune: constants of the kernel's module, and values to try."""
    launches: Callable[[], ModuleType]
    """The module; Triton is imported only where it can run."""
    prepare: Callable[[], object] = lambda: None
    """Brings back inputs that the kernel overwrites."""


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def slope_case() -> Case:
    logits, targets = _random(ROWS, VOCABULARY), torch.randint(0, VOCABULARY, (ROWS,), device=DEVICE)
    # Time and again in place: logits become slopes and slopes of slopes, which takes no less time.
    work = logits.clone()

    def fused() -> Outputs:
        return cross_entropy_gradient.cross_entropy_gradient_(work, targets, kernels="triton")

    def reference() -> Outputs:
        return cross_entropy_gradient.cross_entropy_gradient_(logits, targets, kernels="reference")

    def module() -> ModuleType:
        from normlab.kernels.fused import cross_entropy_gradient

        return cross_entropy_gradient

    settings = {"BLOCK": (4096, 8192, 16384, 32768), "WARPS": (8, 16, 32)}
    prepare = lambda: work.copy_(logits)  # noqa: E731
    return Case("softmax slope, in place", fused, reference, 2 * _bytes(logits), settings, module, prepare)


def swiglu_case() -> Case:
    raw, dh = _random(BATCH * LENGTH, 2 * HIDDEN), _random(BATCH * LENGTH, HIDDEN)

    def module() -> ModuleType:
        from normlab.kernels.fused import swiglu

        return swiglu

    def fused() -> Outputs:
        return swiglu._backward_op(raw, dh)

    def reference() -> Outputs:
        return swiglu.backward_reference(raw, dh)

    settings = {"BLOCK": (512, 1024, 2048, 4096), "WARPS": (2, 4, 8)}
    return Case("swiglu backward", fused, reference, 2 * _bytes(raw, dh), settings, module)


def rotary_case(name: str, by_heads: bool) -> Case:
    shape = (BATCH, HEADS, LENGTH, HEAD_DIM) if by_heads else (BATCH, LENGTH, HEADS, HEAD_DIM)
    dq, dk, dv = (_random(*shape).transpose(1, 2) if by_heads else _random(*shape) for _ in range(3))
    cos, sin = rotary_table(torch.arange(LENGTH, device=DEVICE), HEAD_DIM)

    def module() -> ModuleType:
        from normlab.kernels.fused import rotary

        return rotary

    def fused() -> Outputs:
        return (rotary._backward_op(dq, dk, dv, cos, sin),)

    def reference() -> Outputs:
        return (rotary.backward_reference(dq, dk, dv, cos, sin),)

    settings = {"TOKENS": (4, 8, 16, 32), "HEADS": (1, 2, 4, 8), "PER_THREAD": (4, 8, 16)}
    return Case(name, fused, reference, 2 * _bytes(dq, dk, dv), settings, module)


def cases() -> Iterator[Case]:
    yield slope_case()
    yield swiglu_case()
    yield rotary_case("rotary backward, by heads", by_heads=True)
    yield rotary_case("rotary backward, by tokens", by_heads=False)


def check(case: Case) -> None:
    """The same numbers but for one rounding to bf16 and what fp32 leaves of a difference."""
    case.prepare()
    for one, two in zip(case.fused(), case.reference(), strict=True):
        if not torch.allclose(one.float(), two.float(), rtol=2**-7, atol=1e-5, equal_nan=False):
            worst = float((one.float() - two.float()).abs().max())
            raise NormLabError(f"{case.name}: the kernel differs from its reference by {worst:.3g}; not timed")


def figures(case: Case) -> dict[str, Any]:
    check(case)
    copy = copy_bandwidth(DEVICE, case.bytes_moved)
    fused = measure(case.fused, DEVICE)
    torch._dynamo.reset()
    compiled = measure(torch.compile(case.reference), DEVICE)
    return {
        "case": case.name, "bytes_moved": case.bytes_moved, "copy": copy, "fused": dataclasses.asdict(fused),
        "compiled": dataclasses.asdict(compiled), "share": case.bytes_moved / fused.median / copy,
        "over_compiled": compiled.median / fused.median,
    }  # fmt: skip


def tune(case: Case) -> dict[str, int]:
    """The best of the settings, left in place; one that does not fit the device is passed over."""
    module, times = case.launches(), {}
    for values in itertools.product(*case.settings.values()):
        _set(module, case, values)
        try:
            case.fused()
            times[values] = measure(case.fused, DEVICE, repeats=20).median
        except Exception as error:  # Triton has many ways to say that registers or shared memory are not enough
            print(f"  {values}: {type(error).__name__}")
    best = min(times, key=lambda values: times[values])
    _set(module, case, best)
    return dict(zip(case.settings, best, strict=True))


def _set(module: ModuleType, case: Case, values: Sequence[int]) -> None:
    for name, value in zip(case.settings, values, strict=True):
        setattr(module, name, value)


def main(arguments: Arguments) -> None:
    backends.choose("triton", torch.empty(1, device=DEVICE))
    rows = []
    print(f"{'kernel':28} {'µs':>8} {'of copy':>8} {'compiled µs':>12} {'× faster':>9}")
    for case in cases():
        settings = {}
        if arguments.tune:
            # Parity before any time, and once more below with what was found.
            check(case)
            settings = tune(case)
        row = figures(case) | ({"settings": settings} if settings else {})
        rows.append(row)
        found = " ".join(f"{name}={value}" for name, value in settings.items())
        print(
            f"{case.name:28} {row['fused']['median'] * 1e6:8.1f} {row['share']:8.2f} "
            f"{row['compiled']['median'] * 1e6:12.1f} {row['over_compiled']:9.2f}  {found}".rstrip(),
            flush=True,
        )
    if arguments.out is not None:
        write_json(arguments.out, {**dated(), "rows": rows})


if __name__ == "__main__":
    main(tyro.cli(Arguments))
