"""A step whose numbers may still be on their way from the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from normlab.data import Batch
from normlab.utils.host_copy import HostCopy


class Taken(NamedTuple):
    """A step that was taken, to be judged once its numbers are there."""

    step: int
    values: HostCopy
    """Loss and gradient norm."""
    parts: Sequence[Batch]
    threshold: float
    """The loss beyond which it is a spike."""
