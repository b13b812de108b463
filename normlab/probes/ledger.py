"""`Ledger`: collect small tensors on the device, copy all of them to the host at once."""

# torch annotates hooks, modules and some tensor functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from normlab.probes.measures import wide
from normlab.utils.host_copy import HostCopy


class Ledger:
    """`write` keeps small tensors without waiting for the device; `close` starts one copy to the host per device.

    Reading the first number waits for the copy.
    """

    def __init__(self) -> None:
        self._written: list[torch.Tensor] = []
        self._sent: list[_Parcel] = []
        self._read: list[torch.Tensor] = []

    def write(self, values: torch.Tensor) -> int:
        """Keep a tensor; returns the index to read it by after `close`."""
        self._written.append(values.detach().reshape(-1))
        return len(self._written) - 1

    def write_all(self, values: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Keep named tensors; returns their indices by name."""
        return {name: self.write(value) for name, value in values.items()}

    def close(self) -> None:
        """Start copying everything to the host."""
        for device in {values.device for values in self._written}:
            self._send([place for place, values in enumerate(self._written) if values.device == device])
        self._read = self._written
        self._written = []

    @property
    def is_there(self) -> bool:
        """Whether all copies have reached the host."""
        return all(parcel.sent.is_there for parcel in self._sent)

    def _send(self, places: list[int]) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place in places:
            by_dtype.setdefault(self._written[place].dtype, []).append(place)
        # One conversion for each number format and one copy for all.
        ordered = [place for group in by_dtype.values() for place in group]
        format = wide(self._written[places[0]])  # noqa: A001 (number format: its name everywhere)
        parts = [torch.cat([self._written[place] for place in group]).to(format) for group in by_dtype.values()]
        lengths = [len(self._written[place]) for place in ordered]
        self._sent.append(_Parcel(HostCopy(torch.cat(parts)), ordered, lengths))

    @property
    def _rows(self) -> list[torch.Tensor]:
        for parcel in self._sent:
            for place, row in zip(parcel.places, parcel.sent.wait().split(parcel.lengths), strict=True):
                self._read[place] = row
        self._sent = []
        return self._read

    def tensor(self, place: int) -> torch.Tensor:
        """All numbers of a kept tensor as a 1-D tensor on the host."""
        return self._rows[place]

    def row(self, place: int) -> list[float]:
        """All numbers of a kept tensor as a list."""
        return self._rows[place].tolist()

    def __getitem__(self, place: int) -> float:
        return self._rows[place][0].item()


class _Parcel(NamedTuple):
    sent: HostCopy
    places: list[int]
    lengths: list[int]
