"""Rules on options, optimiser groups and training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from normlab.errors import NormLabError
from normlab.models import Decoder, DecoderConfig
from normlab.schemes.contract.scheme import Scheme
from normlab.testing.rules import require, require_finite, require_refusal, rule
from normlab.testing.small import gradients, leave_neutral_values, make_input, make_stack


@rule("options")
def check_options(scheme: Scheme, others: Mapping[str, Any] | None = None) -> None:
    """Every option of the scheme changes weights, states or output, or its other values are refused."""
    before, known = fingerprint(scheme), others or {}
    for option in scheme.options():
        if option in Scheme.options():
            continue
        tried = [known[option]] if option in known else list(_guesses(scheme, option))
        changed = [made for value in tried if (made := _changed(scheme, option, value)) is not None]
        if changed and not any(differs(before, fingerprint(made)) for made in changed):
            hint = f"pass others={{{option!r}: value}} if another one does"
            raise AssertionError(f"{option} does nothing: tried {', '.join(map(repr, tried))}; {hint}")


def _guesses(scheme: Scheme, option: str) -> Iterator[Any]:
    """Values that differ from the current one; none if no guess is possible."""
    value, kind = getattr(scheme, option), get_type_hints(type(scheme))[option]
    if isinstance(value, bool):
        yield not value
    elif get_origin(kind) is Literal:
        yield from (choice for choice in get_args(kind) if choice != value)
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, float):
        yield from (0.5 * value or 0.5, value + 0.1)


def _changed(scheme: Scheme, option: str, value: Any) -> Scheme | None:
    """The scheme with another value; None if it is refused."""
    try:
        return dataclasses.replace(scheme, **{option: value})
    except NormLabError:
        return None


def fingerprint(scheme: Scheme) -> list[torch.Tensor]:
    """Everything that an option can change: initial weights, the optimiser's rules, all states, the output."""
    stack = make_stack(scheme).double()
    weights = [p.detach().clone() for p in stack.parameters()]
    groups = stack.param_groups(lr=1.0, weight_decay=0.1)
    rules = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    weights.append(torch.tensor([rules[id(p)] for p in stack.parameters()]))
    # Or options that act through a neutral value would have no effect.
    leave_neutral_values(stack)
    states: list[torch.Tensor] = []
    for layer in stack.layers:
        layer.register_forward_hook(lambda _module, _args, state: states.append(state.detach()))
    return [*weights, stack(make_input(dtype=torch.float64, scale=0.1)).detach(), *states]


def differs(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether two fingerprints differ."""
    if [a.shape for a in one] != [b.shape for b in other]:
        return True
    return not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@rule("zero-outputs")
def check_zero_outputs(scheme: Scheme) -> None:
    """Output projections that start at zero are trained, or the scheme sets `zero_outputs = False`."""
    stack = make_stack(scheme, init=False)
    if not scheme.zero_outputs:
        return require_refusal(lambda: stack.init_(zero_outputs=True), "output projections that start at zero")
    stack.init_(zero_outputs=True)
    # Two steps: parameters before a zero matrix get their first gradient one step later.
    for _ in range(2):
        found = gradients(stack, make_input())
        require_finite(found)
        for parameter in stack.parameters():
            parameter.data.sub_(0.1 * parameter.grad)  # type: ignore[operator]
    for role in stack.find_roles():
        if role.role in ("o", "down"):
            require(role.view().any(), f"{role.name} starts at zero and stays there; set zero_outputs = False")
    return None


@rule("optimiser-groups")
def check_optimiser_groups(scheme: Scheme) -> None:
    """Every parameter is in exactly one group, and gains and scales have no weight decay but one of their own."""
    stack = make_stack(scheme)
    groups = stack.param_groups(lr=1e-3, weight_decay=0.1)
    listed = [id(p) for group in groups for p in group["params"]]
    require(sorted(listed) == sorted(map(id, stack.parameters())), "a parameter stands in no group, or in several")
    small = {id(role.parameter) for role in stack.find_roles() if not role.is_matrix}
    for group in groups:
        decays = group["weight_decay"] == 0.1 and bool(small & {id(p) for p in group["params"]})
        require(not decays, "weight decay acts on a gain, a scale or a bias")
    torch.optim.AdamW(groups)


@rule("dimensions")
def check_dimensions(scheme: Scheme) -> None:
    """No parameter is zero-dimensional, because FSDP2 refuses such parameters."""
    changes = [{option: not value} for option, value in _switches(scheme)] + [{"norm": "derf"}]
    variants = [_changed(scheme, option, value) for change in changes for option, value in change.items()]
    for variant in (scheme, *(variant for variant in variants if variant is not None)):
        for name, parameter in make_stack(variant).named_parameters():
            require(parameter.ndim > 0, f"{variant.label}: {name} has no dimension; make it of shape (1,)")


def _switches(scheme: Scheme) -> Iterator[tuple[str, bool]]:
    for option in scheme.options():
        if isinstance(value := getattr(scheme, option), bool):
            yield option, value


@rule("after-step")
def check_after_step(scheme: Scheme) -> None:
    """The constraint after an optimiser step is idempotent and keeps dtypes."""
    stack = make_stack(scheme).to(torch.bfloat16)
    for parameter in stack.parameters():
        parameter.data += 0.1
    stack.after_step()
    once = {name: value.clone() for name, value in stack.state_dict().items()}
    stack.after_step()
    for name, value in stack.state_dict().items():
        require(value.dtype == torch.bfloat16, f"{name} becomes {value.dtype}")
        # Renormalising a rounded unit vector may change its last bit.
        require(torch.allclose(value, once[name], rtol=2**-7, atol=0), f"{name} is changed again by a second call")


@rule("decoder")
def check_decoder(scheme: Scheme) -> None:
    """A small decoder lowers its loss in twenty steps on one batch."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(scheme=scheme, depth=2, dim=16, heads=2, vocab_size=32, max_length=16))
    tokens = torch.randint(0, 32, (4, 17))
    optimiser = torch.optim.AdamW(model.param_groups(lr=1e-2))
    losses = []
    for _ in range(20):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        model.after_step()
        losses.append(loss.item())
    require(losses[-1] < losses[0], f"the loss goes from {losses[0]:.3f} to {losses[-1]:.3f}")
