"""Result of an experiment: figures, a table, and measurements compared with predictions; saved as JSON or HTML."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.progress import ProgressBar, ProgressCallback
from normlab.dynamics.result import SCHEMA, SimulateResult
from normlab.dynamics.system import laws
from normlab.dynamics.view.figures import Figure
from normlab.utils.records import to_plain
from normlab.utils.versions import versions

if TYPE_CHECKING:
    from normlab.dynamics.experiments import Experiment

TableValue = float | str | None


@dataclass(frozen=True, kw_only=True)
class PredictionVerdict:
    """A measured number compared with its prediction."""

    subject: str
    """Scheme, or other object, that was measured."""
    quantity: str
    measured: float
    predicted: float | None
    """None if there is no prediction."""
    error: float | None = None
    """Absolute or relative difference, in the same unit as `tolerance`."""
    tolerance: float | None = None
    agrees: bool | None = None
    """Whether the error is within the tolerance; None without a prediction."""
    low: float | None = None
    high: float | None = None
    """95 % interval of the measurement, if there is one."""

    @property
    def sentence(self) -> str:
        if self.predicted is None:
            return f"{self.subject}: {self.quantity} {self.measured:.4g}, no prediction"
        says = "as predicted" if self.agrees else "not as predicted"
        return f"{self.subject}: {self.quantity} {self.measured:.6g}, {says} ({self.predicted:.6g})"


def judge_prediction(
    subject: str,
    quantity: str,
    measured: float,
    predicted: float | None,
    tolerance: float,
    *,
    relative: bool = False,
    interval: tuple[float, float] | None = None,
) -> PredictionVerdict:
    """Compare a measurement with its prediction, within an absolute or relative tolerance."""
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
    """What the `run` function of an experiment returns."""

    figures: tuple[Figure, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[TableValue, ...], ...]
    verdicts: tuple[PredictionVerdict, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExperimentResult(SimulateResult):
    """A finished experiment."""

    what = "result"

    experiment: str
    about: str
    config: dict[str, Any]
    figures: tuple[Figure, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[TableValue, ...], ...]
    """Rows of the table."""
    verdicts: tuple[PredictionVerdict, ...]
    notes: tuple[str, ...] = ()
    """Assumptions, and choices that the sources leave open."""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    schema: Literal[1] = SCHEMA

    @property
    def agrees(self) -> bool:
        """Whether every prediction holds."""
        return all(verdict.agrees is not False for verdict in self.verdicts)

    def table(self) -> str:
        """Table and verdicts as plain text."""
        from normlab.dynamics.view.card import result_text

        return result_text(self)


def run_experiment(
    experiment: Experiment,
    config: SimulateConfig,
    work: Callable[[SimulateConfig, ProgressCallback], Findings],
    *,
    progress: bool,
    command: Sequence[str],
) -> ExperimentResult:
    """Run `work` and return its findings with configuration, versions, duration and command."""
    config = config.replace(scheme=laws.expand_all(config.scheme))
    experiment.check(config)
    begin = time.perf_counter()
    with ProgressBar(progress=progress) as display:
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


def _cell(value: TableValue) -> TableValue:
    """Convert integers to floats, so that a table is the same after a JSON round trip."""
    return float(value) if isinstance(value, int) else value
