"""Recognise how a model of several residual streams reads and merges them, and use its modules in blocks.

A published layer of several streams has a module that turns the streams into a branch's input and the coefficients of
its write. It is recognised by what it computes: a scheme's own `read`, with the module's parameters, must return the
same. Which options are tried is the scheme's to say (`read_options`, `exit_options`); their values are taken from the
module's attributes and from the shapes of its parameters.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from normlab.errors import NormLabError
from normlab.hf.conversion.foreign_norm import ModelNorm
from normlab.norms import Gain, Norm, rms_norm
from normlab.roles import Spec
from normlab.schemes.catalog.registry import find_class, list_schemes
from normlab.schemes.contract.parts import split_read
from normlab.schemes.contract.streams import StreamScheme

_AGREE = 1e-4
"""Relative to the largest entry; both compute in fp32."""
_LOGIT = 6.0
"""Size of the logits at random coefficients: so large that every round of Sinkhorn's algorithm is seen."""
_CLOSED = -14.0
"""Logit at which a sigmoid is as small as common epsilons, which are then seen."""
_TINY = 1e-3
_ANY_WIDTH = 8
_GAINS: tuple[Gain, ...] = ("none", "plain", "offset")


_known: dict[Any, StreamRead | None] = {}


@dataclass(frozen=True)
class StreamRead:
    """How a module reads the streams: the scheme that reads alike, and the layout of its input and output."""

    scheme: StreamScheme
    """The scheme that reads so; the options of norms that are no part of the module are left at their defaults."""
    outputs: tuple[int, ...]
    """Where in the module's output the branch's input and the coefficients of the write are, in the scheme's order."""
    state: int | None
    """Where in the module's output the streams themselves are; None if it does not return them."""
    flat: bool
    """Whether the streams lie in a row, (..., n·D), instead of (..., n, D)."""
    normed: bool
    """Whether the module normalises the branch's input itself."""

    def reads_as(self, scheme: Any) -> bool:
        """Whether another scheme reads in the same way, with norms of any kind."""
        if type(scheme) is not type(self.scheme):
            return False
        names = (*scheme.read_options, "eps", *(("norm", "gain", "bias") if self.normed else ()))
        return all(getattr(scheme, name) == getattr(self.scheme, name) for name in names)


class ModelRead(nn.Module):
    """Wrapper of a model's own module that reads the streams, and of the norm behind it, for use in a block."""

    def __init__(self, connection: nn.Module, outputs: Sequence[int], norm: ModelNorm | Norm | None):
        super().__init__()
        self.connection, self.norm, self.outputs = connection, norm or nn.Identity(), tuple(outputs)

    def forward(self, state: Tensor) -> tuple[Tensor, ...]:
        found = self.connection(state)
        seen, *carry = (found[place] for place in self.outputs)
        return (self.norm(seen), *carry)

    def parameter_roles(self) -> Mapping[str, Spec]:
        matrices = {name: one for name, one in self.connection.named_parameters() if one.ndim == 2}
        return {f"connection.{name}": "mix" if len(one) < one.shape[1] else "spread" for name, one in matrices.items()}


class FirstStream(nn.Module):
    """The first of n equal streams: what a model copied before its first layer."""

    def __init__(self, streams: int, flat: bool):
        super().__init__()
        self.streams, self.flat = streams, flat

    def forward(self, state: Tensor) -> Tensor:
        return state.unflatten(-1, (self.streams, -1))[..., 0, :] if self.flat else state[..., 0, :]


def recognise_read(module: nn.Module) -> StreamRead | None:
    """What a module does that returns a branch's input and coefficients; None if no scheme reads in this way."""
    if not any(parameter.ndim == 2 for parameter in module.parameters()):
        return None
    # Layers hold many such modules that differ in their values alone.
    numbers = [(name, value) for part in module.modules() for name, value in vars(part).items() if _is_number(value)]
    key = (type(module), tuple(_shapes(module)), tuple(numbers))
    if key not in _known:
        # On the CPU even while a model is laid out on the meta device: what is compared has values.
        with torch.device("cpu"), torch.no_grad():
            _known[key] = _recognise_read(module)
    return _known[key]


def _recognise_read(module: nn.Module) -> StreamRead | None:
    for kind in _stream_schemes():
        for scheme, dim in _settings(kind, kind.read_options, module):
            read: Any = scheme.bind(depth=1, dim=dim).block(0).steps[0].read
            for flat in (False, True):
                found = _compare(module, read, scheme, dim, flat)
                if found is not None:
                    return found
    return None


def recognise_head(module: nn.Module, scheme: StreamScheme, dim: int, flat: bool) -> StreamScheme | None:
    """The scheme with the options of its exit by which it merges the streams as a module does; None if it cannot."""
    with torch.device("cpu"), torch.no_grad():
        alike = (one for one in _exits(scheme) if _shapes(_build(one, dim, exit_=True)) == _shapes(module))
        return next((one for one in alike if _merges(module, one, dim, flat)), None)


def load_weights_(ours: nn.Module, theirs: nn.Module) -> None:
    """Copy all parameters of a model's module into a scheme's, by their shapes and order."""
    waiting = list(ours.parameters())
    with torch.no_grad():
        for source in theirs.parameters():
            place = next(place for place, one in enumerate(waiting) if one.shape == source.shape)
            waiting.pop(place).copy_(source)


# -- which settings are tried ----------------------------------------------------------------------------------------


def _stream_schemes() -> Iterator[type[StreamScheme]]:
    for name in list_schemes():
        kind = find_class(name)
        if issubclass(kind, StreamScheme) and kind.read_options:
            yield kind


def _settings(kind: type[StreamScheme], names: Sequence[str], module: nn.Module) -> Iterator[tuple[StreamScheme, int]]:
    """Settings of a scheme whose read has parameters of the module's shapes, and the width of one stream."""
    wanted, widths = _shapes(module), sorted({size for one in module.parameters() for size in one.shape})
    # Most modules have another number of matrices or vectors, and nothing else is tried for them.
    gains = [gain for gain in _GAINS if _ranks(_build(kind(gain=gain), _ANY_WIDTH, exit_=False)) == _ranks(module)]
    choices = [_values(kind, name, module) for name in (*names, "eps")] if gains else []
    known: dict[Any, bool] = {}
    for gain, values, width in itertools.product(gains, itertools.product(*choices), widths):
        options: dict[str, Any] = dict(zip((*names, "eps"), values, strict=True)) | {"gain": gain}
        try:
            scheme = kind(**options)
        except NormLabError:
            continue
        if width % scheme.streams == 0 and width > scheme.streams:
            dim = width // scheme.streams
            shape = (gain, dim, *(value for value in values if not isinstance(value, float)))
            if shape not in known:
                known[shape] = _shapes(_build(scheme, dim, exit_=False)) == wanted
            if known[shape]:
                yield scheme, dim


def _exits(scheme: StreamScheme) -> Iterator[StreamScheme]:
    choices = [_values(type(scheme), name, nn.Module()) for name in scheme.exit_options]
    for values in itertools.product(*choices):
        yield replace(scheme, **dict(zip(scheme.exit_options, values, strict=True)))


def _values(kind: type[StreamScheme], name: str, module: nn.Module) -> list[Any]:
    """Values to try for an option: the choices of a literal, numbers that the module holds, its default."""
    hint, default = get_type_hints(kind)[name], kind.options()[name].default
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    own = [value for part in module.modules() for value in vars(part).values() if type(value) is hint]
    sizes = [size for one in module.parameters() for size in one.shape] if hint is int else []
    return list(dict.fromkeys([*own, default, *sizes]))


def _build(scheme: StreamScheme, dim: int, *, exit_: bool) -> nn.Module:
    with torch.device("meta"):
        bound = scheme.bind(depth=1, dim=dim)
        return bound.exit() if exit_ else bound.block(0).steps[0].read  # type: ignore[return-value]


def _ranks(module: nn.Module) -> list[int]:
    return sorted(parameter.ndim for parameter in module.parameters())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return sorted(tuple(parameter.shape) for parameter in module.parameters())


# -- whether both compute the same -----------------------------------------------------------------------------------


def _compare(module: nn.Module, read: nn.Module, scheme: StreamScheme, dim: int, flat: bool) -> StreamRead | None:
    found: StreamRead | None = None
    for trial, ours, x in _trials(module, read, scheme, dim):
        seen, carry = split_read(ours(x))
        given = x.flatten(-2) if flat else x
        theirs = _outputs(trial, given)
        state = next((place for place, one in enumerate(theirs) if one is given), None)
        outputs = [_place(one, theirs) for one in carry]
        normed = scheme.gain != "none"
        first = _place(seen, theirs if normed else [_normalised(one, scheme.eps) for one in theirs])
        if first is None or None in outputs:
            return None
        found = StreamRead(scheme, (first, *outputs), state, flat, normed)  # type: ignore[arg-type]
    return found


def _merges(module: nn.Module, scheme: StreamScheme, dim: int, flat: bool) -> bool:
    made = scheme.bind(depth=1, dim=dim).exit()
    for trial, one, x in _trials(module, made, scheme, dim):
        (theirs, *_) = [*_outputs(trial, x.flatten(-2) if flat else x), None]
        if theirs is None or not _same(one(x), theirs if scheme.gain != "none" else _normalised(theirs, scheme.eps)):
            return False
    return True


def _trials(
    module: nn.Module, ours: nn.Module, scheme: StreamScheme, dim: int
) -> Iterator[tuple[nn.Module, nn.Module, Tensor]]:
    """(module, our module with its parameters, streams): at random, at a tiny state, with sigmoids nearly closed."""
    generator = torch.Generator().manual_seed(0)
    trial = copy.deepcopy(module).to_empty(device="cpu").float().eval()
    x = torch.randn(2, 3, scheme.streams, dim, generator=generator, dtype=torch.float32)
    rows = {len(one) for one in trial.parameters() if one.ndim == 2}
    for scale, shift in ((1.0, 0.0), (_TINY, 0.0), (1.0, _CLOSED)):
        for one in trial.parameters():
            size = _LOGIT / one.shape[-1] ** 0.5 if one.ndim == 2 else 1.0
            one.copy_(size * torch.randn(one.shape, generator=generator))
            if one.ndim == 1 and len(one) in rows:
                one.add_(shift)
        load_weights_(ours, trial)
        yield trial, ours, scale * x


def _outputs(trial: nn.Module, x: Tensor) -> list[Tensor]:
    try:
        found: Any = trial(x)
    except Exception:
        # A module that does not accept the streams alone reads them in another way.
        return []
    return [one for one in (found if isinstance(found, tuple) else (found,)) if isinstance(one, Tensor)]


def _normalised(x: Tensor, eps: float) -> Tensor:
    return rms_norm(x, eps)


def _place(wanted: Tensor, outputs: Sequence[Tensor]) -> int | None:
    return next((place for place, one in enumerate(outputs) if _same(wanted, one)), None)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and float((one - other).abs().max()) <= _AGREE * float(one.abs().max())
