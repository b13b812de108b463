"""Find the law (speed and radial growth) of a scheme by name; also laws without a scheme, and user-defined ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
"""Laws without a scheme: name → function of depth."""


def law_names() -> list[str]:
    """Names of all laws that can be simulated, sorted: of schemes that state a speed, and laws without a scheme."""
    return sorted([*filter(_has_flow, registry.list_schemes()), *_ALONE])


def expand_all(names: Iterable[str]) -> tuple[str, ...]:
    """The given names; "all" is replaced by the names of all laws."""
    return tuple(name for spec in names for name in (law_names() if spec == "all" else [spec]))


def _has_flow(name: str) -> bool:
    try:
        return registry.scheme(name).law(1).speed is not None
    except NormLabError:
        return False


def find_law(spec: str | Scheme | Law, depth: int) -> Law:
    """Return the law of a scheme (name or object) at a depth, of a stand-alone name, or a given `Law`; checks it."""
    if isinstance(spec, Law):
        return _check_law(spec)
    scheme = scheme_of(spec)
    return _check_law(_ALONE[_name(str(spec))](depth) if scheme is None else scheme.law(depth))


def learnt_law(scheme: Scheme, blocks: Sequence[Block]) -> Law:
    """The law of a scheme with the learnt parameters of a trained network's blocks."""
    return _check_law(scheme.learnt_law(blocks))


def scheme_of(spec: str | Scheme | Law) -> Scheme | None:
    """The scheme of a name; None for a law without a scheme, which has no network."""
    if isinstance(spec, Law) or (isinstance(spec, str) and _name(spec) in _ALONE):
        return None
    if isinstance(spec, str) and reference.read(spec) is None and not _is_scheme(spec):
        raise unknown("scheme or law", _name(spec), law_names())
    return registry.scheme(spec)


def _name(spec: str) -> str:
    return registry.parse(spec)[0].strip().lower()


def _is_scheme(spec: str) -> bool:
    try:
        registry.find_class(_name(spec))
    except NormLabError:
        return False
    return True


def _check_law(law: Law) -> Law:
    """Return the law if its functions return one finite number per token; else raise."""
    if law.speed is None:
        raise NormLabError(
            f"this scheme states no speed, so it cannot be simulated; try one of {', '.join(law_names())}"
        )
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
