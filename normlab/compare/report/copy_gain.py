"""What a model gains by copying from its context, read from a stored profile, and its words on pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normlab.pages.numbers import finite_or_none, minus

COPYING_NOTE = (
    "Nats by which the loss of a sequence of random tokens falls when it is repeated: 0 for a model that does not copy "
    "from its context (it has no induction heads)."
)


def copy_gain(profile: Mapping[str, Any]) -> float | None:
    """Loss of the first copy less that of the second; None where it was not measured or is not finite."""
    first, second = (finite_or_none(profile.get(f"{copy}_copy_loss")) for copy in ("first", "second"))
    return None if first is None or second is None else first - second


def gain_words(gain: float) -> str:
    """A gain in nats, to two digits."""
    return minus(f"{gain:z.2f}")
