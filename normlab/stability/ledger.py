"""Numbers that stay on their device until all of them are fetched at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from normlab.stability.measures import wide


class Ledger:
    """`write` remembers small tensors without waiting for the device; `close` brings them over, once per device."""

    def __init__(self) -> None:
        self._written: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []

    def write(self, values: torch.Tensor) -> int:
        """The place of a tensor, to be read when the ledger is closed."""
        self._written.append(values.detach().reshape(-1))
        return len(self._written) - 1

    def write_all(self, values: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The same for tensors with names."""
        return {name: self.write(value) for name, value in values.items()}

    def close(self) -> None:
        """Fetch everything."""
        self._rows = list(self._written)
        for device in {values.device for values in self._written}:
            self._fetch([place for place, values in enumerate(self._written) if values.device == device])
        self._written = []

    def _fetch(self, places: list[int]) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place in places:
            by_dtype.setdefault(self._written[place].dtype, []).append(place)
        # One conversion for each number format and one copy for all.
        ordered = [place for group in by_dtype.values() for place in group]
        format = wide(self._written[places[0]])  # noqa: A001 (number format: its name everywhere)
        parts = [torch.cat([self._written[place] for place in group]).to(format) for group in by_dtype.values()]
        fetched = torch.cat(parts).cpu().split([len(self._written[place]) for place in ordered])
        for place, row in zip(ordered, fetched, strict=True):
            self._rows[place] = row

    def tensor(self, place: int) -> torch.Tensor:
        """All numbers of a tensor, in one dimension, on the host."""
        return self._rows[place]

    def row(self, place: int) -> list[float]:
        """All numbers of a tensor."""
        return self._rows[place].tolist()

    def __getitem__(self, place: int) -> float:
        return self._rows[place][0].item()
