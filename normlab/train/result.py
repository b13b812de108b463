"""How a run ended, as `train` returns it and as status.json keeps it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    state: str
    """done, stopped or failed."""
    reason: str | None
    """Why it did not come to its end."""
    loss: float | None
    """Last evaluation, in nats a token."""
    bits_per_byte: float | None
    steps: int
    tokens: int
    seconds: float
    """Of training, over all its sessions."""
    tokens_per_s: float
    peak_bytes: int | None
    device: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
