"""Laws by name: those of schemes, those that no block of ours has, and a user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from normlab.errors import NormLabError, unknown
from normlab.schemes.catalog import reference, registry
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.law import Law, Motion, on_sphere
from normlab.schemes.contract.scheme import Scheme


def _sqrt(depth: int) -> Law:
    return Law(
        speed=lambda m: (m.time + 1.0).sqrt(),
        rms=on_sphere,
        forward="bounded",
        backward="not known",
        note="√-scaling of arXiv 2510.22026, N(x + A(x)/√(t + 1)): not the block that LN-Scaling trains, which is lns",
    )


_ALONE: dict[str, Callable[[int], Law]] = {"sqrt": _sqrt}
"""Laws without a block: depth → law."""


def names() -> list[str]:
    """Every name that has a law, sorted."""
    return sorted([*registry.list_schemes(), *_ALONE])


def find(spec: str | Scheme | Law, depth: int) -> Law:
    """The law of a scheme at a depth, by its name or as an object; a stand-alone law; or a user's own, tried out."""
    if isinstance(spec, Law):
        return _tried(spec)
    scheme = scheme_of(spec)
    return _tried(_ALONE[_name(str(spec))](depth) if scheme is None else scheme.law(depth))


def learnt(scheme: Scheme, blocks: Sequence[Block]) -> Law:
    """The law of a scheme with what the blocks of a trained network have learnt."""
    return _tried(scheme.learnt_law(blocks))


def scheme_of(spec: str | Scheme | Law) -> Scheme | None:
    """The scheme behind a name, which has a network as well as a law; None where there is a law alone."""
    if isinstance(spec, Law) or (isinstance(spec, str) and _name(spec) in _ALONE):
        return None
    if isinstance(spec, str) and reference.read(spec) is None and not _is_scheme(spec):
        raise unknown("scheme or law", _name(spec), names())
    return registry.scheme(spec)


def _name(spec: str) -> str:
    return registry.parse(spec)[0].strip().lower()


def _is_scheme(spec: str) -> bool:
    try:
        registry.find_class(_name(spec))
    except NormLabError:
        return False
    return True


def _tried(law: Law) -> Law:
    """The law, if what it returns for a system of tokens looks like tokens' speeds."""
    if law.speed is None:
        raise NormLabError("this scheme states no speed, so there is no flow to follow; try its network")
    ones = torch.ones(2, 3)
    motion = Motion(time=0.0 * ones, radius=ones, attention=ones, radial=0.6 * ones, tangent=0.8 * ones)
    for name, part in (("speed", law.speed), ("radial", law.radial)):
        found = part(motion)
        if not isinstance(found, torch.Tensor) or found.shape != ones.shape:
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise NormLabError(f"a law's {name} must return one number for each token, (2, 3) here, got {shape}")
        if bool(found.isnan().any()):
            raise NormLabError(f"a law's {name} returns NaN for plain tokens; expected a number for each")
    return law
