"""The report of a table of losses, which may come from anyone's runs; its rows are kept beside the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normlab.errors import NormLabError
from normlab.ladders.places import check_beyond
from normlab.ladders.report.content import LadderReport
from normlab.ladders.rows import LadderRow, read_table
from normlab.ladders.statistics import answer
from normlab.ladders.statistics.answer import Place, place_name
from normlab.utils.counts import parse_count
from normlab.utils.files import read_json, write_json
from normlab.utils.records import from_plain, to_plain
from normlab.utils.results_folder import TABLE, refuse_other_results


@dataclass(frozen=True, kw_only=True)
class LossTable:
    """Losses of runs that were trained elsewhere, and what is asked of them."""

    rows: list[LadderRow]
    baseline: str
    targets: list[Place]
    level: float

    def report(self) -> LadderReport:
        """The content of its report."""
        return LadderReport(
            self.rows, answer(self.rows, baseline=self.baseline, targets=self.targets, level=self.level)
        )

    def store(self, folder: Path) -> None:
        """Write table.json, from which `normlab report` builds the page again; never beside trained runs."""
        refuse_other_results(folder, TABLE)
        write_json(folder / TABLE, to_plain(self))


def read_losses(
    path: Path, *, baseline: str | None = None, targets: Sequence[str] = (), level: float = 0.95
) -> LossTable:
    """A table of losses that can be answered from: two schemes or more, with cells in common."""
    rows = read_table(path)
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    if len(schemes) < 2 or not any(row.is_usable for row in rows):
        what = "no run with a loss" if len(schemes) > 1 else f"one scheme ({schemes[0]})" if schemes else "no rows"
        raise NormLabError(f"{path} has {what}; a gap needs losses of two schemes at the same sizes and budgets")
    base = baseline or ("pre" if "pre" in schemes else schemes[0])
    if base not in schemes:
        raise NormLabError(f"baseline {base!r} is not in {path}; its schemes are {', '.join(schemes)}")
    _check_shared(rows, base, path)
    # The baseline's FLOPs, as at every cell: a scheme may need more for the same tokens.
    places = [_target(text, [row for row in rows if row.scheme == base]) for text in targets]
    return LossTable(rows=rows, baseline=base, targets=places, level=level)


def stored_losses(folder: Path) -> LossTable | None:
    """The table whose page a folder holds; None if there is none."""
    path = folder / TABLE
    return from_plain(LossTable, read_json(path), str(path)) if path.is_file() else None


def _check_shared(rows: Sequence[LadderRow], baseline: str, path: Path) -> None:
    """Raise if the baseline has no size and budget in common with any scheme.

    Sizes without a name are named by their parameters, and a scheme may have some of its own.
    """
    cells = {(row.size, row.tokens) for row in rows if row.scheme == baseline}
    others = [row for row in rows if row.scheme != baseline]
    shared = [row for row in others if (row.size, row.tokens) in cells]
    if shared:
        _check_seeds([row.seed for row in rows if row.scheme == baseline], shared, baseline, path)
        return
    own = next(row for row in rows if row.scheme == baseline)
    raise NormLabError(
        f"{path}: no scheme has a size and a budget in common with {baseline} ({baseline}: {own.size}, "
        f"{own.tokens:,} tokens; {others[0].scheme}: {others[0].size}, {others[0].tokens:,} tokens); "
        "name sizes alike in a column size"
    )


def _check_seeds(seeds: Sequence[int], others: Sequence[LadderRow], baseline: str, path: Path) -> None:
    """Raise if no scheme has a seed of the baseline."""
    if {row.seed for row in others}.isdisjoint(seeds):
        raise NormLabError(
            f"{path}: no scheme has a seed in common with {baseline} ({baseline}: seed {seeds[0]}; {others[0].scheme}: "
            f"seed {others[0].seed}); gaps are taken seed by seed: give runs that saw the same batches one number"
        )


def _target(text: str, rows: Sequence[LadderRow]) -> Place:
    """A target of a table, parameters:tokens; its FLOPs a token are those of the largest size, in proportion."""
    expected = "expected parameters:tokens, e.g. 1.3B:26B"
    parameters_text, colon, tokens_text = text.partition(":")
    if not colon:
        raise NormLabError(f"{text!r} is not a target of a table; {expected}")
    try:
        parameters, tokens = parse_count(parameters_text), parse_count(tokens_text)
    except NormLabError as error:
        raise NormLabError(f"{text!r} is not a target of a table; {expected} ({error})") from None
    if not (parameters and tokens):
        raise NormLabError(f"target {text!r}: parameters and tokens must be positive; try 1.3B:26B")
    largest = max(rows, key=lambda row: (row.parameters, row.tokens))
    flops = largest.flops / (largest.parameters * largest.tokens) * parameters * tokens
    target = Place(name=text, size=parameters_text, parameters=parameters, tokens=tokens, flops=flops)
    top = max(rows, key=lambda row: row.flops)
    check_beyond(target, top.flops, place_name(top.size, top.tokens))
    return target
