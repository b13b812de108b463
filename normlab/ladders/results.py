"""Read the results of a ladder's folder, or of a table of losses, as the content of a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from normlab.compare.store import Store
from normlab.errors import NormLabError
from normlab.ladders import report
from normlab.ladders.description import FILE, read_description
from normlab.ladders.forecast import check_rows, read_forecast
from normlab.ladders.report.content import LadderReport
from normlab.ladders.report.design import StoredForecast
from normlab.ladders.rows import LadderRow, read_table
from normlab.ladders.statistics import answer
from normlab.ladders.statistics.answer import Place
from normlab.ladders.stored_rows import judged_rows
from normlab.utils.counts import count


def is_ladder(folder: Path) -> bool:
    """Whether a folder was made by `normlab ladder`."""
    return (folder / FILE).is_file()


def read_report(folder: Path, field: str = "loss") -> LadderReport:
    """The content of the report of a ladder's folder; `field` names the loss in its rows, as loss_books.

    Only the main loss is forecast.
    """
    about, rows = read_description(folder), judged_rows(Store(folder).rows(), field)
    forecast = read_forecast(folder) if field == "loss" else None
    design = about.design
    if forecast is not None:
        check_rows(rows, forecast, folder)
        shown = StoredForecast(written=forecast.written, commit=forecast.commit, hash=forecast.hash)
        design = dataclasses.replace(design, forecast=shown)
    found = answer(
        rows, baseline=about.baseline, targets=about.targets, level=about.level,
        held_out=forecast.cells if forecast is not None else None,
        edge_rates=sorted({search.scheme for search in design.rates if search.edge is not None}),
    )  # fmt: skip
    return LadderReport(rows, found, design)


def build(folder: str | Path, *, out: str | Path | None = None) -> Path:
    """Write the HTML report of a ladder, by default `report.html` in its folder; return its path."""
    path = Path(folder) / "report.html" if out is None else Path(out)
    if path.is_dir():
        raise NormLabError(f"{path} is a folder; expected a file, e.g. {path / 'report.html'}")
    return report.build(read_report(Path(folder)), path)


def markdown(folder: str | Path) -> str:
    """The answer of a ladder as Markdown."""
    return report.markdown(read_report(Path(folder)))


def report_of_table(
    path: Path, *, baseline: str | None = None, targets: Sequence[str] = (), level: float = 0.95
) -> LadderReport:
    """The content of the report of a table of losses, which may come from anyone's runs."""
    rows = read_table(path)
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    base = baseline or ("pre" if "pre" in schemes else next(iter(schemes), ""))
    if base not in schemes:
        raise NormLabError(f"baseline {base!r} is not in {path}; its schemes are {', '.join(schemes) or 'none'}")
    places = [_table_target(text, rows) for text in targets]
    return LadderReport(rows, answer(rows, baseline=base, targets=places, level=level))


def _table_target(text: str, rows: Sequence[LadderRow]) -> Place:
    """A target of a table, parameters:tokens; its FLOPs a token are those of the nearest size, in proportion."""
    parameters_text, colon, tokens_text = text.partition(":")
    if not colon:
        raise NormLabError(f"{text!r} is not a target of a table; expected parameters:tokens, e.g. 1.3B:26B")
    parameters, tokens = count(parameters_text), count(tokens_text)
    nearest = max(rows, key=lambda row: (row.parameters, row.tokens))
    flops = nearest.flops / (nearest.parameters * nearest.tokens) * parameters * tokens
    return Place(name=text, size=parameters_text, parameters=parameters, tokens=tokens, flops=flops)
