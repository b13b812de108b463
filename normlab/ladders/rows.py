"""LadderRow: the final loss of one run of a ladder. All statistics and pages of a ladder start from these rows.

A row is one scheme at one size, one budget of tokens and one seed. Budgets of one size, scheme and seed may be cooldown
branches of one trunk: then their noise is correlated, and they are not independent seeds.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError
from normlab.pages import numbers
from normlab.utils.counts import parse_count

REQUIRED = ("scheme", "parameters", "tokens", "flops", "seed", "loss")
"""Columns of a table of losses; `size`, `steps`, `trunk`, `tokens_per_s`, `lr` and `state` may be added."""

LARGEST_LOSS = 100.0
"""Nats a token above which no model has trained: one that guesses has the logarithm of its vocabulary, 10 to 12."""

_SAME = 1.1
"""Budgets up to this factor apart may have the same FLOPs, where a table has rounded them."""

STATES = ("done", "stuck", "diverged", "failed")
"""How a run may have ended; only rows that are done enter a fit."""

_PLAUSIBLE = (1e-2, 1e4)
"""FLOPs a token and parameter between which training lies: usually 6, less in a sparse model, more with long texts."""


def _whole(text: str) -> int:
    """A whole number, which a table may hold as 3.0: pandas writes so where the column has an empty cell."""
    return int(text.removesuffix(".0"))


_READ: dict[str, tuple[Callable[[str], Any], str]] = {
    **dict.fromkeys(("scheme", "size", "trunk", "state"), (str, "text")),
    **dict.fromkeys(("parameters", "tokens", "steps"), (parse_count, "a count")),
    **dict.fromkeys(("flops", "tokens_per_s", "lr"), (float, "a number; write it in digits, as 2.1e16")),
    "loss": (float, "a number; write it as 3.25, or leave it empty for a run that did not train"),
    "seed": (_whole, "a whole number; count seeds 0, 1, 2"),
}
"""How the cells of each column are read, and what they should be, with advice."""

_POSITIVE = {
    "parameters": "give the model's parameters",
    "tokens": "give the tokens of training",
    "flops": "give those of the whole training, or 6 × parameters × tokens",
    "loss": "leave it empty for a run that did not train",
    "tokens_per_s": "leave it empty where it was not measured",
}
"""Columns whose values must be positive, with advice."""

_ABSENT = {
    "flops": " (6 × parameters × tokens will do)",
    "seed": " (number the runs of a scheme 0, 1, 2; runs that saw the same batches share a number)",
}
"""Advice on columns that are not there."""


@dataclass(frozen=True)
class LadderRow:
    """One ended run: its place on the ladder and its final validation loss."""

    scheme: str
    size: str
    """Name of the model size, "12x768"; a table without names has the number of parameters in words, "110M"."""
    parameters: int
    tokens: int
    flops: float
    """FLOPs of training on these tokens, attention and head included."""
    seed: int
    loss: float | None
    """Final validation loss in nats a token; None where the run has none."""
    steps: int | None = None
    trunk: str | None = None
    """Name of the trunk that this run is a cooldown branch of; rows with the same trunk share most of their path."""
    tokens_per_s: float | None = None
    """Training speed, where the run had the device for itself."""
    lr: float | None = None
    state: str = "done"
    """done, stuck (no better than the unigram entropy), diverged or failed: only rows that are done enter a fit."""
    started: str | None = None
    """When the run began, in ISO format."""
    copying: float | None = None
    """Nats by which the loss of a random sequence falls when it is repeated, at the end of the run."""
    forecast: str | None = None
    """Hash of the forecast that was written before this run began, for rows of the size that is held out."""

    @property
    def is_usable(self) -> bool:
        """Whether the row enters a fit."""
        return self.state == "done" and self.loss is not None and math.isfinite(self.loss)

    @property
    def cell(self) -> tuple[int, int]:
        """Parameters and tokens: the place on the ladder."""
        return self.parameters, self.tokens


def read_table(path: Path) -> list[LadderRow]:
    """The rows of a CSV table that somebody else's runs may have filled: the required columns, and any optional one.

    Commas, semicolons or tabs separate its cells. Counts may have units (29.5M). An empty loss, nan or inf is a run
    that did not train.
    """
    head, *lines = _cells(path) or [[]]
    names = [name.strip().lower() for name in head]
    if twice := next((name for name in names if name in _READ and names.count(name) > 1), None):
        raise NormLabError(f"{path} has two columns {twice}; keep one, or give the other another name")
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise NormLabError(
            f"{path} has no column {missing[0]}{_ABSENT.get(missing[0], '')}; expected {', '.join(REQUIRED)} in the "
            f"first line of a CSV table, got {', '.join(head)[:200] or 'an empty line'}"
        )
    texts = [(number, [cell.strip() for cell in line]) for number, line in enumerate(lines, start=2) if any(line)]
    rows = [_parse(names, line, f"{path}, line {number}") for number, line in texts]
    _refuse_repeats(rows, path)
    _check_sizes(rows, path)
    _check_flops([row for row in rows if row.is_usable], path)
    return _with_planned_flops(rows)


def _cells(path: Path) -> list[list[str]]:
    """The cells of all lines."""
    try:
        # "-sig": spreadsheets begin a file with a byte-order mark.
        text = path.read_text(encoding="utf-8-sig")
        separator = max(",;\t", key=text.partition("\n")[0].count)
        return list(csv.reader(io.StringIO(text), delimiter=separator))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        said = error.strerror if isinstance(error, OSError) else error
        if isinstance(error, UnicodeDecodeError):
            said = "it is not UTF-8 text"
        raise NormLabError(
            f"cannot read {path}: {said}; expected a CSV table in UTF-8 with {', '.join(REQUIRED)}"
        ) from None


def _parse(names: list[str], line: list[str], place: str) -> LadderRow:
    text = _by_column(names, line, place)
    found: dict[str, Any] = {name: _cell(name, text.get(name, ""), place) for name in _READ}
    trained = found["loss"] is not None and math.isfinite(found["loss"])
    found["loss"] = found["loss"] if trained else None
    # W&B calls a run finished whose process came to its end, whatever the loss was.
    if found["state"] in (None, "finished"):
        found["state"] = "done" if trained else "failed"
    if found["state"] not in STATES:
        raise NormLabError(
            f"{place}: unknown state {found['state']!r}; expected {', '.join(STATES)}, or nothing; leave "
            "out runs that were interrupted"
        )
    if found["state"] != "done" or not trained:
        found["flops"] = _flops_of_lost(found)
    needed = ("scheme", "parameters", "tokens", "flops", "seed")
    if empty := next((name for name in needed if found[name] is None), None):
        raise NormLabError(f"{place}: {empty} is empty; only the loss of a run that did not train may be")
    for name, advice in _POSITIVE.items():
        if found[name] is not None and not 0.0 < found[name] < math.inf:
            raise NormLabError(f"{place}: {name} must be positive, got {text[name]}; {advice}")
    found["size"] = found["size"] or numbers.format_count(found["parameters"])
    row = LadderRow(**found)
    if row.is_usable and row.loss is not None and row.loss > LARGEST_LOSS:
        raise NormLabError(
            f"{place}: a loss of {row.loss:.3g} nats a token is that of no model that trained; leave it empty, or "
            "give the logarithm of a perplexity"
        )
    return row


def _flops_of_lost(found: dict[str, Any]) -> float | None:
    """FLOPs of a run that did not train, of which no fit needs any: where a table has none, 6 a token and parameter."""
    given, product = found["flops"], (found["parameters"] or 0) * (found["tokens"] or 0)
    is_plausible = given is not None and product and _PLAUSIBLE[0] <= given / product <= _PLAUSIBLE[1]
    return given if is_plausible else 6.0 * product or given


def _with_planned_flops(rows: list[LadderRow]) -> list[LadderRow]:
    """The rows, those that did not train at the compute of a run that did: a tracker counts up to where they ended."""
    usable = [row for row in rows if row.is_usable]
    anyone = {(row.size, row.tokens): row.flops for row in usable}
    own = {(row.scheme, row.size, row.tokens): row.flops for row in usable}

    def planned(row: LadderRow) -> float:
        other = anyone.get((row.size, row.tokens), row.flops)
        return own.get((row.scheme, row.size, row.tokens), other)

    return [row if row.is_usable else replace(row, flops=planned(row)) for row in rows]


def _by_column(names: list[str], line: list[str], place: str) -> dict[str, str]:
    """The cells of a line by their column; a line that is too long is shifted somewhere, by a comma in a number."""
    if any(line[len(names) :]):
        raise NormLabError(
            f"{place} has {len(line)} cells for {len(names)} columns; write decimals with a point, and quote a text "
            "that has a comma"
        )
    return dict(zip(names, line, strict=False))


def _cell(name: str, text: str, place: str) -> Any:
    """The value of one cell of a table; None where it is empty."""
    read, kind = _READ[name]
    try:
        return read(text) if text else None
    except ValueError:
        raise NormLabError(f"{place}: {name}: {text!r} is not {kind}") from None
    except NormLabError as error:
        raise NormLabError(f"{place}: {name}: {error}") from None


def _refuse_repeats(rows: list[LadderRow], path: Path) -> None:
    seen: set[Any] = set()
    sizes: dict[Any, str] = {}
    for row in rows:
        # At any budget: a place is its parameters and tokens, and two sizes would be taken for one.
        other = sizes.setdefault((row.scheme, row.parameters), row.size)
        if other != row.size:
            raise NormLabError(
                f"{path}: {row.scheme} has {row.parameters:,} parameters with both {other} and {row.size}, and "
                "places are told apart by that number; give exact counts"
            )
        key = (row.scheme, row.cell, row.seed)
        if key in seen:
            raise NormLabError(
                f"{path}: {row.scheme} with {row.size}, {row.tokens:,} tokens and seed {row.seed} is listed twice; "
                "keep one row"
            )
        seen.add(key)


def _check_sizes(rows: list[LadderRow], path: Path) -> None:
    """Raise unless a size of a scheme has one number of parameters: two models of one name would be taken for one."""
    known: dict[tuple[str, str], int] = {}
    for row in rows:
        parameters = known.setdefault((row.scheme, row.size), row.parameters)
        if row.parameters != parameters:
            raise NormLabError(
                f"{path}: {row.scheme} with {row.size} has {parameters:,} parameters and {row.parameters:,}; name each "
                "size apart in a column size, or give it one number"
            )


def _check_flops(rows: list[LadderRow], path: Path) -> None:
    """Raise unless FLOPs are those of training: they grow with the tokens, and are about 6 a token and parameter."""
    before: dict[tuple[str, str], LadderRow] = {}
    for row in sorted(rows, key=lambda row: row.tokens):
        last = before.setdefault((row.scheme, row.size), row)
        if row.tokens > _SAME * last.tokens and row.flops <= last.flops:
            raise NormLabError(
                f"{path}: {row.scheme} with {row.size} has {last.flops:.3g} FLOPs at {last.tokens:,} tokens and "
                f"{row.flops:.3g} at {row.tokens:,}; {_POSITIVE['flops']}"
            )
        before[row.scheme, row.size] = row
    for row in rows:
        each = row.flops / row.tokens / row.parameters
        if not _PLAUSIBLE[0] <= each <= _PLAUSIBLE[1]:
            raise NormLabError(
                f"{path}: {row.scheme} with {row.parameters:,} parameters, {row.tokens:,} tokens and {row.flops:.3g} "
                f"FLOPs has {each:.2g} FLOPs a token and parameter, where about 6 are usual; write out millions and "
                "TFLOPs (110M, 2.1e16), and give FLOPs of the whole training"
            )
