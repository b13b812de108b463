"""The head's loss in chunks against the plain path, forward and backward: `python benchmarks/cross_entropy.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from normlab.bench.timing import measure
from normlab.models.cross_entropy import chunked_cross_entropy

ON_GPU = torch.cuda.is_available()
TOKENS, WIDTH, VOCABULARY = (32768, 768, 50304) if ON_GPU else (512, 64, 1024)


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return chunked_cross_entropy(hidden, weight, targets).loss


def main() -> None:
    device = torch.device("cuda" if ON_GPU else "cpu")
    hidden = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, device=device, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), device=device)
    for name, call in (("plain", plain), ("chunked", chunked)):
        for how, loss in (("eager", call), ("compiled", torch.compile(call))):

            def step(loss=loss) -> None:
                with torch.autocast(device.type, torch.bfloat16):
                    value = loss(hidden, weight, targets)
                torch.autograd.grad(value, (hidden, weight))

            step()
            before = torch.cuda.memory_allocated() if ON_GPU else 0
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
            time = measure(step, device, repeats=10)
            extra = (torch.cuda.max_memory_allocated() - before) / 2**20 if ON_GPU else float("nan")
            print(f"{name}, {how}: {time.median * 1e3:.2f} ms, {extra:.0f} MiB extra at the peak")


if __name__ == "__main__":
    main()
