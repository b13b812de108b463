"""Read the results of a ladder's folder, or of a table of losses, as the content of a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from normlab.compare.report.restored import restored_cautions
from normlab.compare.store import Store
from normlab.ladders import report
from normlab.ladders.description import Description, read_description
from normlab.ladders.forecast import StoredForecast, read_forecasts
from normlab.ladders.forecast_checks import check_rows_follow, forecast_cautions
from normlab.ladders.report.content import LadderReport
from normlab.ladders.report.design import ForecastFacts
from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics import EdgeRate, answer
from normlab.ladders.statistics.answer import CellForecast, LadderAnswer
from normlab.ladders.statistics.ladder_answer import no_answer
from normlab.ladders.stored_rows import judged_rows, validation_sets
from normlab.ladders.table import stored_losses
from normlab.utils.files import writable, write_json
from normlab.utils.results_folder import LADDER, TABLE


def is_ladder(folder: Path) -> bool:
    """Whether a folder was made by `normlab ladder`, from runs of its own or from a table of losses."""
    return (folder / LADDER).is_file() or (folder / TABLE).is_file()


def read_report(folder: Path) -> LadderReport:
    """The content of the report of a ladder's folder; raises if rows of the held-out size precede its forecast."""
    if not (folder / LADDER).is_file() and (losses := stored_losses(folder)) is not None:
        return losses.report()
    about, stored = read_description(folder), Store(folder).rows()
    design = about.design
    rows = judged_rows(stored, set_aside=design.set_aside)
    forecasts = read_forecasts(folder)
    check_rows_follow(rows, forecasts, folder, design.held_out)
    design = dataclasses.replace(
        design, forecast=_facts(forecasts[0]) if forecasts else None,
        further_forecasts=tuple(_facts(one) for one in forecasts[1:]),
        cautions=(*design.cautions, *forecast_cautions(forecasts, rows), *restored_cautions(stored)),
    )  # fmt: skip
    found = _answer(about, rows, [cell for one in forecasts for cell in one.cells])
    sets = {
        name: _answer(about, judged_rows(stored, f"loss_{name}", set_aside=design.set_aside))
        for name in validation_sets(stored)
    }
    return LadderReport(rows, found, design, sets)


def _facts(stored: StoredForecast) -> ForecastFacts:
    return ForecastFacts(
        written=stored.written, commit=stored.commit, hash=stored.hash, schemes=tuple(sorted(stored.covered))
    )


def _answer(
    about: Description, rows: Sequence[LadderRow], held_out: Sequence[CellForecast] | None = None
) -> LadderAnswer:
    """The answer from rows of one validation loss; only the main one is forecast."""
    if not any(row.scheme == about.baseline for row in rows):
        return no_answer(about.baseline, about.level)
    design = about.design
    edges = [
        EdgeRate(scheme=search.scheme, size=search.size, lr=search.pick, tokens=search.tokens)
        for search in design.rates
        if search.edge is not None and search.pick is not None
    ]
    epochs = {cell.tokens: cell.epochs for cell in design.cells if cell.epochs is not None}
    return answer(
        rows, baseline=about.baseline, targets=about.targets, level=about.level, held_out=held_out, edge_rates=edges,
        epochs=epochs,
    )  # fmt: skip


def build(folder: str | Path, *, out: str | Path | None = None) -> Path:
    """Write the report of a ladder as HTML and JSON into its folder, or to `out`, a page or a .json file.

    Returns the path of what was asked for.
    """
    content = read_report(Path(folder))
    if out is None:
        return write_report(content, Path(folder))
    path = Path(out)
    if path.suffix != ".json":
        return report.build(content, writable(path, ".html"))
    write_json(path, report.to_json(content))
    return path


def write_report(content: LadderReport, folder: Path) -> Path:
    """Write report.html and report.json; return the path of the page."""
    write_json(folder / "report.json", report.to_json(content))
    return report.build(content, folder / "report.html")


def markdown(folder: str | Path) -> str:
    """The answer of a ladder as Markdown."""
    return report.markdown(read_report(Path(folder)))
