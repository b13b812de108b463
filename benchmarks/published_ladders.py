"""Do forecasts of gaps come true on ladders that others have trained and published?

    git clone https://github.com/marin-community/marin && git -C marin checkout f9ee0273
    git clone https://github.com/mlfoundations/scaling && git -C scaling checkout a003c49
    python benchmarks/published_ladders.py --optimizers marin --texts scaling --out results/published-ladders.json

The calibration of `normlab ladder` is by simulation, with truths and noise of our own. Here both are real: ten
optimisers against AdamW (arXiv 2509.02046: 130M to 1.2B parameters, 1 to 16 × Chinchilla) and three training texts
(arXiv 2403.08540: 11M to 6.9B parameters, 0.25 to 32 × Chinchilla). The smaller cells of each ladder are fitted, the
larger ones are forecast and held against what was measured. Both ladders have one run a cell.

Forecasts as published came first. Their misses showed that the runs of the second paper are of two series: those with a
seed in their files end 0.08 nats lower. "One series" compares a text with runs of C4 of its own series only.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from tables import published_ladders

from normlab.bench.facts import dated
from normlab.errors import NormLabError
from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics.answer import FEW_STEPS
from normlab.ladders.statistics.cells import LARGEST_GAP, Cell, cells_of, largest_gap
from normlab.ladders.statistics.estimators.fit import estimate, sample_of
from normlab.ladders.statistics.estimators.simple_law import simple_law_prior
from normlab.ladders.statistics.implausible import implausible_losses
from normlab.utils.files import write_json

LEVEL = 0.95
CHINCHILLA = 20
"""Tokens per parameter of a budget of 1 ×, in both."""

_OPTIMISERS_VOCABULARY, _OPTIMISERS_LENGTH, _OPTIMISERS_DEPTH = 128_256, 4096, 32
_OPTIMISERS_WIDTH = {"130m": 512, "300m": 768, "520m": 1024, "1.2b": 1536}
_TEXTS_LENGTH, _TEXTS_BASELINE = 2048, "c4_original"
_TEXTS_SHAPE = {
    "d=96_l=8_h=4": (8, 96), "d=512_l=8_h=4": (8, 512), "d=576_l=24_h=8": (24, 576), "d=1024_l=24_h=8": (24, 1024),
    "open_lm_1b": (24, 2048), "open_lm_7b": (32, 4096),
}  # fmt: skip
"""Depth and width by size, smallest first."""

EXPONENTS = np.arange(0.1, 0.85, 0.05)
"""Exponents that are tried for a law of one scheme: L = E + A / N^α + B / D^β."""


@dataclass(frozen=True)
class Split:
    """Which cells are fitted, and which are forecast from them; a cell may be neither."""

    name: str
    is_seen: Callable[[LadderRow], bool]
    is_held_out: Callable[[LadderRow], bool]


@dataclass(frozen=True)
class Ladder:
    """A published table of losses."""

    name: str
    baseline: str
    rows: list[LadderRow]
    splits: tuple[Split, ...]

    @property
    def group(self) -> str:
        """What stands before the colon: ladders of one source, a ladder for each of its validation texts."""
        return self.name.split(":")[0]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Checkouts of the two repositories."""

    optimizers: Path | None = None
    """marin-community/marin at f9ee0273: experiments/optimizer_sweep/Analysis/Results."""
    texts: Path | None = None
    """mlfoundations/scaling at a003c49: exp_data/models."""
    out: Path | None = None


def main(arguments: Arguments) -> None:
    """Forecast, print and store."""
    facts = dated()
    ladders = []
    if arguments.optimizers:
        ladders.append(optimisers(arguments.optimizers / "experiments/optimizer_sweep/Analysis/Results"))
    if arguments.texts:
        ladders += texts(arguments.texts / "exp_data/models")
    if not ladders:
        raise NormLabError("nothing to forecast; give --optimizers, --texts or both")
    rows, left_out = [], []
    contradictions = {ladder.name: implausible_losses(ladder.rows, FEW_STEPS) for ladder in ladders}
    for ladder, split in ((one, split) for one in ladders for split in one.splits):
        for scheme in dict.fromkeys(row.scheme for row in ladder.rows if row.scheme != ladder.baseline):
            found = forecasts(ladder, split, scheme)
            rows += found or []
            if found is None:
                left_out.append({"ladder": ladder.name, "group": ladder.group, "split": split.name, "scheme": scheme})
    print(published_ladders(rows))
    print(f"gaps of {LARGEST_GAP} nats and more, so no forecast: {len(left_out)}")
    print("schemes whose losses contradict each other: " + ", ".join(_counts(ladders, contradictions)))
    if arguments.out:
        record = {"level": LEVEL, "left_out": left_out, "contradictions": contradictions, "rows": rows}
        write_json(arguments.out, {**facts, "numpy": np.__version__, **record})


def _counts(ladders: Sequence[Ladder], contradictions: dict[str, list[str]]) -> Iterator[str]:
    """Schemes with a contradiction, and all of them, by group of ladders."""
    for group in dict.fromkeys(ladder.group for ladder in ladders):
        own = [ladder for ladder in ladders if ladder.group == group]
        schemes = sum(len({row.scheme for row in ladder.rows}) for ladder in own)
        yield f"{group} {sum(len(contradictions[ladder.name]) for ladder in own)} of {schemes}"


def forecasts(ladder: Ladder, split: Split, scheme: str) -> list[dict[str, Any]] | None:
    """The held-out cells of one scheme, forecast and measured; None where gaps are too large to be fitted."""
    own = [row for row in ladder.rows if row.scheme in (scheme, ladder.baseline)]
    seen = [row for row in own if split.is_seen(row)]
    cells = [cell for cell in cells_of(seen, scheme, ladder.baseline) if cell.is_usable]
    held_out = [
        cell
        for cell in cells_of([row for row in own if split.is_held_out(row)], scheme, ladder.baseline)
        if cell.is_usable
    ]
    if not held_out:
        return []
    if largest_gap(cells) >= LARGEST_GAP:
        return None
    sample, places = sample_of(cells), [cell.place for cell in held_out]
    smooth = estimate(sample, places, new_seeds=1)
    simple = estimate(sample, places, prior_of=simple_law_prior, new_seeds=1)
    laws = [fit_law([row for row in seen if row.scheme == name]) for name in (scheme, ladder.baseline)]
    top = max(cell.flops for cell in cells)
    return [
        {
            "ladder": ladder.name, "group": ladder.group, "split": split.name, "scheme": scheme,
            "size": cell.place.size, "parameters": cell.parameters, "tokens": cell.tokens,
            "times_top": cell.flops / top, "measured": cell.mean,
            "smooth": _interval(m.interval(LEVEL)), "simple_law": _interval(k.interval(LEVEL)),
            "last_gap": nearest(cells, cell).mean, "separate_laws": laws[0](cell) - laws[1](cell),
        }
        for cell, m, k in zip(held_out, smooth, simple, strict=True)
    ]  # fmt: skip


def _interval(own: Any) -> dict[str, float]:
    return {"low": own.low, "high": own.high, "mean": own.mean}


def nearest(cells: Sequence[Cell], place: Cell) -> Cell:
    """The fitted cell that is fewest e-folds of parameters and of tokens away."""
    return min(
        cells,
        key=lambda own: abs(math.log(own.parameters / place.parameters)) + abs(math.log(own.tokens / place.tokens)),
    )


def fit_law(rows: Sequence[LadderRow]) -> Callable[[Cell], float]:
    """The usual law of one scheme's loss, by least squares, over a grid of its two exponents."""
    usable = [row for row in rows if row.is_usable]
    parameters, tokens = (np.array([float(getattr(row, name)) for row in usable]) for name in ("parameters", "tokens"))
    loss = np.array([row.loss for row in usable], dtype=float)
    best: tuple[float, np.ndarray, float, float] | None = None
    for a, b in itertools.product(EXPONENTS.tolist(), repeat=2):
        columns = np.stack([np.ones_like(loss), parameters**-a, tokens**-b], axis=1)
        scale = columns.max(axis=0)
        weights = np.linalg.lstsq(columns / scale, loss, rcond=None)[0] / scale
        error = float(((columns @ weights - loss) ** 2).sum())
        # A loss that a larger model or budget makes worse, or one below zero, is no law.
        if weights.min() >= 0.0 and (best is None or error < best[0]):
            best = error, weights, a, b
    if best is None:
        return lambda cell: math.nan
    _, weights, a, b = best
    return lambda cell: float(weights @ np.array([1.0, cell.parameters**-a, cell.tokens**-b]))


def optimisers(folder: Path) -> Ladder:
    """Ten optimisers against AdamW, each tuned at every cell up to 8 × Chinchilla and 520M; loss on C4."""
    small = ("130m", "300m", "520m")
    splits = (
        Split(
            "8 and 16 x from 1, 2 and 4 x Chinchilla",
            lambda row: row.size in small and _times(row) <= 4,
            lambda row: row.size in small and _times(row) > 4,
        ),
        Split(
            "1.2B from three sizes",
            lambda row: row.size in small and _times(row) <= 8,
            lambda row: row.size == "1.2b",
        ),
    )
    files = sorted(folder.glob("*/*/*/result.json"))
    if not files:
        raise NormLabError(f"{folder} has no OPTIMISER/SIZE/TIMES/result.json; check out f9ee0273")
    rows = [_optimiser_row(file) for file in files]
    return Ladder("optimisers", "adamw", rows, splits)


def _times(row: LadderRow) -> int:
    return round(row.tokens / (CHINCHILLA * row.parameters))


def _optimiser_row(file: Path) -> LadderRow:
    optimiser, size, times = file.parts[-4:-1]
    width = _OPTIMISERS_WIDTH[size]
    # Four hidden units a width and three matrices in an MLP; embedding and head are not counted as parameters.
    blocks = _OPTIMISERS_DEPTH * (12 * width**2 + 4 * width**2)
    tokens = CHINCHILLA * blocks * int(times)
    matrices = blocks + width * _OPTIMISERS_VOCABULARY
    flops = _flops(matrices, _OPTIMISERS_DEPTH, width, _OPTIMISERS_LENGTH) * tokens
    loss = json.loads(file.read_text(encoding="utf-8"))["min_loss"]
    return LadderRow(optimiser, size, blocks, tokens, flops, 0, float(loss))


def _flops(matrices: int, depth: int, width: int, length: int) -> float:
    """FLOPs of training on one token."""
    return 6.0 * matrices + 12.0 * depth * width * length


def texts(folder: Path) -> list[Ladder]:
    """Three training texts, a ladder for each of eight validation texts; the baseline is C4."""
    sizes = list(_TEXTS_SHAPE)
    splits = (
        Split(
            "8 to 32 x from 0.25 to 4 x Chinchilla",
            lambda row: row.size in sizes[:4] and row.tokens <= 4.5 * CHINCHILLA * row.parameters,
            lambda row: row.size in sizes[:4] and row.tokens > 4.5 * CHINCHILLA * row.parameters,
        ),
        Split("411M from three sizes", lambda row: row.size in sizes[:3], lambda row: row.size == sizes[3]),
        Split("1.4B and 6.9B from four sizes", lambda row: row.size in sizes[:4], lambda row: row.size in sizes[4:]),
    )
    files = sorted(folder.glob("*.json"))
    if not files:
        raise NormLabError(f"{folder} has no results; check out a003c49")
    by_text: dict[str, list[LadderRow]] = {}
    series: dict[tuple[str, str, int], int | None] = {}
    for file in files:
        stored = json.loads(file.read_text(encoding="utf-8"))
        for result in stored["results"]:
            row = _text_row(stored, result["loss"])
            by_text.setdefault(_validation_text(result), []).append(row)
            series[row.scheme, row.size, row.tokens] = stored["hyperparameters"].get("seed")
    return [
        Ladder(f"{name}: {text}", _TEXTS_BASELINE, own, splits)
        for text, rows in by_text.items()
        for name, own in (("texts", rows), ("texts, one series", _of_one_series(rows, series)))
    ]


def _of_one_series(rows: Sequence[LadderRow], series: dict[tuple[str, str, int], int | None]) -> list[LadderRow]:
    """Rows without those whose partner of the baseline is of the other series."""
    return [
        row
        for row in rows
        if series[row.scheme, row.size, row.tokens] == series.get((_TEXTS_BASELINE, row.size, row.tokens))
    ]


def _validation_text(result: dict[str, Any]) -> str:
    file = Path(result["val_data"][0])
    return file.parent.name if file.parent.name != "val_tok_mult" else file.stem


def _text_row(stored: dict[str, Any], loss: float) -> LadderRow:
    facts = stored["hyperparameters"]
    size = Path(facts["model"]).stem
    depth, width = _TEXTS_SHAPE[size]
    # "params_no_embed" counts the head; tokens are 20 for every parameter, embedding counted.
    flops = _flops(facts["params_no_embed"], depth, width, _TEXTS_LENGTH) * facts["tokens"]
    return LadderRow(stored["dataset_name"], size, facts["params"], facts["tokens"], flops, 0, float(loss))


if __name__ == "__main__":
    main(tyro.cli(Arguments))
