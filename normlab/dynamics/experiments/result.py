"""The result of an experiment: figures, a table, and verdicts against what was foretold, in plain numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.result import SCHEMA, Shown
from normlab.dynamics.system import laws
from normlab.dynamics.view.figures import Figure
from normlab.dynamics.view.progress import Progress
from normlab.utils.records import to_plain
from normlab.utils.versions import versions

if TYPE_CHECKING:
    from normlab.dynamics.experiments import Experiment

Tell = Callable[[str, float], None]
Cell = float | str | None


@dataclass(frozen=True, kw_only=True)
class PredictionVerdict:
    """A number against its prediction."""

    subject: str
    """Of which scheme, or of what."""
    quantity: str
    measured: float
    predicted: float | None
    """None where nothing is foretold."""
    error: float | None = None
    """How far apart they are, in the measure that `tolerance` is in."""
    tolerance: float | None = None
    agrees: bool | None = None
    """None where there is nothing to agree with."""
    low: float | None = None
    high: float | None = None
    """95 % interval of what was measured, where there is one."""

    @property
    def words(self) -> str:
        if self.predicted is None:
            return f"{self.subject}: {self.quantity} {self.measured:.4g}, nothing foretold"
        says = "as foretold" if self.agrees else "not as foretold"
        return f"{self.subject}: {self.quantity} {self.measured:.6g}, {says} ({self.predicted:.6g})"


def judge(
    subject: str,
    quantity: str,
    measured: float,
    predicted: float | None,
    tolerance: float,
    *,
    relative: bool = False,
    interval: tuple[float, float] | None = None,
) -> PredictionVerdict:
    """A verdict: agreement within a tolerance, absolute or relative to the prediction."""
    low, high = interval or (None, None)
    if predicted is None:
        return PredictionVerdict(
            subject=subject, quantity=quantity, measured=measured, predicted=None, low=low, high=high
        )
    scale = abs(predicted) if relative and predicted else 1.0
    error = abs(measured - predicted) / scale
    return PredictionVerdict(
        subject=subject,
        quantity=quantity,
        measured=measured,
        predicted=predicted,
        error=error,
        tolerance=tolerance,
        agrees=math.isfinite(error) and error <= tolerance,
        low=low,
        high=high,
    )


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What an experiment's own code hands over."""

    figures: tuple[Figure, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    verdicts: tuple[PredictionVerdict, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExperimentResult(Shown):
    """A finished experiment."""

    what = "result"

    experiment: str
    about: str
    config: dict[str, Any]
    figures: tuple[Figure, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    """The table."""
    verdicts: tuple[PredictionVerdict, ...]
    notes: tuple[str, ...] = ()
    """What a reader must know: assumptions, and choices that sources leave open."""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    schema: Literal[1] = SCHEMA

    @property
    def agrees(self) -> bool:
        """Whether everything that was foretold came out so."""
        return all(verdict.agrees is not False for verdict in self.verdicts)

    def table(self) -> str:
        """Table and verdicts as plain text."""
        from normlab.dynamics.view.card import result_text

        return result_text(self)


def finish(
    experiment: Experiment,
    config: SimulateConfig,
    work: Callable[[SimulateConfig, Tell], Findings],
    *,
    progress: bool,
    command: Sequence[str],
) -> ExperimentResult:
    """Do the work and keep it with what it was made by."""
    config = config.replace(scheme=schemes(config))
    begin = time.perf_counter()
    with Progress(progress=progress) as display:
        found = work(config, display)
    return ExperimentResult(
        experiment=experiment.name,
        about=experiment.about,
        config=to_plain(config),
        figures=found.figures,
        columns=found.columns,
        rows=tuple(tuple(_cell(cell) for cell in row) for row in found.rows),
        verdicts=found.verdicts,
        notes=found.notes,
        seconds=time.perf_counter() - begin,
        versions=versions(),
        command=tuple(command),
    )


def _cell(value: Cell) -> Cell:
    """Whole numbers as numbers like any other, so that a table read back is the same."""
    return float(value) if isinstance(value, int) else value


def schemes(config: SimulateConfig) -> tuple[str, ...]:
    """The schemes of a configuration, where "all" stands for every law there is."""
    return tuple(name for spec in config.scheme for name in (laws.names() if spec == "all" else [spec]))


def part(tell: Tell, place: int, count: int) -> Tell:
    """Tells of one of several equal parts."""
    return lambda what, share: tell(what, (place + share) / count)
