"""What a model looks like from block to block while it trains: size, update, angle, cosine, rank, gradient.

One forward and one backward pass on a small batch, of which nothing remains: gradients and random numbers are as they
were before. Boundary 0 is the state after the entry, boundary k the state after block k. The measures are those of
`normlab.probes.measures`; they stay on the device until the last one is made, and are then fetched at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from normlab.data import IGNORED
from normlab.models.transformer import Transformer
from normlab.probes import measures
from normlab.probes.hidden_state import HiddenState, sample
from normlab.probes.ledger import Ledger
from normlab.train.monitor.summary import spread

RANKED = 17
"""Most boundaries whose effective rank is worked out: it takes the eigenvalues of a matrix, on the host."""

Places = dict[str, int]


def profile(model: Transformer, inputs: torch.Tensor, targets: torch.Tensor, **options: Any) -> dict[str, Any]:
    """The fields of a "profile" record, one value for each boundary; None stands for what is not finite.

    hidden_rms      √mean h² over tokens and entries
    update_ms       mean (h - h_before)² of what the block before the boundary added; None at 0
    angular_speed   angle in radians by which that block turned a token, mean over tokens; None at 0
    token_cosine    mean cosine of two tokens of a sequence
    effective_rank  exp(entropy of the normalised spectrum) of at most 256 tokens; None where it was not worked out
    grad_norm       ‖∂(sum of the tokens' losses)/∂state‖ of one token, root mean square over tokens: whatever the batch
    """
    with untouched(model), states_of(model) as states:
        model.loss(inputs, targets, **options).backward()
    ledger = Ledger()
    with torch.no_grad(), torch.autocast(inputs.device.type, enabled=False):
        counted = ledger.write((targets != IGNORED).sum())
        looks = _write(model, states, ledger)
    ledger.close()
    tokens = model.stack.hidden(states[0]).shape[:-1].numel()
    # The loss is a mean over the targets that count, so a token's own gradient is that many times larger.
    return _read(looks, ledger, ledger[counted] / math.sqrt(tokens))


@contextmanager
def states_of(model: Transformer) -> Iterator[list[torch.Tensor]]:
    """Collects the state at every boundary of the next forward pass, each with its gradient after the backward pass."""
    states: list[torch.Tensor] = []
    places: list[nn.Module] = [model.stack.entry, *model.stack.layers]

    def keep(_module: nn.Module, _args: Any, state: torch.Tensor) -> None:
        # Activation checkpointing runs the blocks once more in the backward pass.
        if len(states) < len(places):
            state.retain_grad()
            states.append(state)

    with ExitStack() as hooks:
        for place in places:
            hooks.callback(place.register_forward_hook(keep).remove)
        yield states


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Runs the model as it was written, not compiled, and leaves its gradients and all random numbers as they were."""
    compiled = [(m, m._compiled_call_impl) for m in model.modules() if m._compiled_call_impl is not None]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        for parameter, _ in grads:
            parameter.grad = None
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
        for parameter, grad in grads:
            parameter.grad = grad


def _write(model: Transformer, states: list[torch.Tensor], ledger: Ledger) -> list[Places]:
    """Measure every boundary; a state is let go as soon as the next one was compared with it."""
    ranked, before, looks = {*spread(len(states), RANKED)}, None, []
    for place, state in enumerate(states):
        hidden = HiddenState(sample(model.stack.hidden(state.detach())))
        found = {"hidden_rms": measures.rms(hidden), "broken": measures.broken(hidden)}
        found |= {"token_cosine": measures.token_cosine(hidden)}
        if place in ranked:
            found["gram"] = measures.gram(hidden)
        if before is not None:
            found |= {"update": measures.rms(measures.increment(before, hidden))}
            found |= {"angular_speed": measures.ang(before, hidden)}
        # Not every state has a gradient: the loss of no target at all has none.
        if state.grad is not None:
            found |= measures.gradient(state.grad)
        looks.append(ledger.write_all(found))
        before = hidden
    return looks


def _read(looks: list[Places], ledger: Ledger, of_one_token: float) -> dict[str, Any]:
    whole = [ledger[look["broken"]] == 0.0 for look in looks]

    def series(name: str, *, both: bool = False) -> list[float | None]:
        """A measure at every boundary; `both`: of a block, which is only known where the state before it was whole."""
        known = [whole[k] and (not both or whole[k - 1]) for k in range(len(looks))]
        pairs = zip(looks, known, strict=True)
        return [_finite(ledger[look[name]]) if fit and name in look else None for look, fit in pairs]

    sizes = series("update", both=True)
    return {
        "layers": list(range(len(looks))),
        "hidden_rms": series("hidden_rms"),
        "update_ms": [None if size is None else size * size for size in sizes],
        "angular_speed": series("angular_speed", both=True),
        "token_cosine": series("token_cosine"),
        "effective_rank": [_rank(look, ledger) if fit else None for look, fit in zip(looks, whole, strict=True)],
        "grad_norm": [_gradient(look, ledger, of_one_token) for look in looks],
    }


def _rank(look: Places, ledger: Ledger) -> float | None:
    if "gram" not in look:
        return None
    products = ledger.tensor(look["gram"])
    return _finite(measures.ranks(products.float().view(math.isqrt(len(products)), -1))[0])


def _gradient(look: Places, ledger: Ledger, of_one_token: float) -> float | None:
    if "grad_h" not in look or ledger[look["grad_broken"]]:
        return None
    return _finite(ledger[look["grad_h"]] * of_one_token)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
