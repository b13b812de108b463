"""A training step whose loss and gradient norm may still be in an asynchronous copy from the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from normlab.data import Batch
from normlab.utils.host_copy import HostCopy


class Taken(NamedTuple):
    """A training step that was taken and is not judged yet."""

    step: int
    values: HostCopy
    """Loss and gradient norm."""
    parts: Sequence[Batch]
    threshold: float
    """Loss above which the step is a spike."""
