"""The tables of benchmarks/README.md, made from the dated results beside it: `python benchmarks/tables.py`."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from normlab.compare.statistics import SchemeResult, rank_schemes

HERE = Path(__file__).parent


def kernels(rows: list[dict[str, Any]]) -> str:
    """One line per step and shape, both directions."""
    head = "| step | shape | share of copy, forward | backward | × `torch.compile`, forward | backward | × Liger |"
    lines = [head, "|" + "---|" * 7]
    for forward, backward in zip(rows[::2], rows[1::2], strict=True):
        pair = (forward, backward)
        cells = [f"{row['share']:.2f}" for row in pair] + [f"{row['over_compiled']:.2f}" for row in pair]
        liger = " / ".join(f"{row['over_liger']:.2f}" for row in pair if "over_liger" in row) or "–"
        lines.append("| " + " | ".join([forward["case"], " × ".join(map(str, forward["shape"])), *cells, liger]) + " |")
    return "\n".join(lines)


def steps(rows: list[dict[str, Any]]) -> str:
    """One line per scheme or peer, beside the faster Pre-Norm; the GPU's share where the file has it."""
    titles = ["scheme", "kernels", "tokens/s", "× the faster Pre-Norm", "lowest to highest", "memory ×"]
    has_shares = "mfu" in rows[0]
    titles += ["parameters", "of the ceiling", "MFU, data sheet"] if has_shares else []
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        span = f"{min(row['paired']):.3f} to {max(row['paired']):.3f}"
        cells = [f"{row['median']:,.0f}", f"{row['over_pre']:.3f}", span, f"{row['memory_over_pre']:.3f}"]
        cells += _shares(row) if has_shares else []
        lines.append(f"| {row['scheme']} | {row['kernels']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shares(row: dict[str, Any]) -> list[str]:
    shares = ["–" if row[name] is None else f"{row[name]:.1%}" for name in ("share_of_ceiling", "mfu")]
    return [f"{row['parameters'] / 1e6:,.1f} M", *shares]


def model_kernels(rows: list[dict[str, Any]]) -> str:
    """One line per kernel."""
    lines = ["| kernel | µs | share of copy | × `torch.compile` |", "|" + "---|" * 4]
    for row in rows:
        cells = [f"{1e6 * row['fused']['median']:.1f}", f"{row['share']:.2f}", f"{row['over_compiled']:.2f}"]
        lines.append(f"| {row['case']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def training(rows: list[dict[str, Any]]) -> str:
    """One line per size."""
    head = "| size | sequences a step | tokens/s | share of the ceiling | loader's share | peak memory, GiB |"
    lines = [head, "|" + "---|" * 6]
    for row in rows:
        peak = "–" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        cells = [row["size"], str(row["batch"]), f"{row['tokens_per_s']:,.0f}", f"{row['share_of_ceiling']:.1%}"]
        lines.append("| " + " | ".join([*cells, f"{row['loader_share']:.1%}", peak]) + " |")
    return "\n".join(lines)


def grid(rows: list[dict[str, Any]]) -> str:
    """One line per size: milliseconds of a step, shares of the ceiling, what bounds it."""
    counts = list(rows[0]["shares"])
    titles = ["size", "plain loop, ms", "no graphs", "graphs", "kernels alone", *(f"{n} at once" for n in counts)]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        rates = (row["plain"], row["without_graphs"], row["at_once"]["1"], 1.0 / row["replay_seconds"])
        cells = [f"{1e3 / rate:.1f}" for rate in rates] + [f"{row['shares'][n]:.1%}" for n in counts]
        lines.append("| " + " | ".join([row["size"], *cells]) + " |")
    return "\n".join(lines)


def rates(rows: list[dict[str, Any]]) -> str:
    """One line per scheme: the loss of the run that tried each rate, and the judging runs at the best one."""
    tried = sorted({row["lr"] for row in rows})
    titles = ["scheme", *(f"{lr:g}" for lr in tried), "judging seeds, at the best rate"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        own = [row for row in rows if row["scheme"] == scheme]
        tuned = {row["lr"]: _loss(row) for row in own if row["role"] == "tune"}
        judged = sorted((row for row in own if row["role"] == "judge"), key=lambda row: row["seed"])
        cells = [*(tuned.get(lr, "–") for lr in tried), ", ".join(map(_loss, judged)) or "not run yet"]
        lines.append("| " + " | ".join([scheme, *cells]) + " |")
    return "\n".join(lines)


def gaps(arms: list[dict[str, Any]]) -> str:
    """One line per scheme: its difference to the baseline in every arm of a study, with simultaneous intervals."""
    lines = [
        "| | " + " | ".join(arm["name"].replace("=", " ") for arm in arms) + " |",
        "|" + "---|" * (len(arms) + 1),
    ]
    standings = [rank_schemes(arm["rows"], arm["baseline"]) for arm in arms]
    for scheme in dict.fromkeys(own.scheme for each in standings for own in each if own.verdict != "baseline"):
        cells = [_gap(next((own for own in each if own.scheme == scheme), None)) for each in standings]
        lines.append("| " + " | ".join([scheme, *cells]) + " |")
    return "\n".join(lines)


def _gap(own: SchemeResult | None) -> str:
    if own is None or own.difference is None:
        return "not run yet"
    found = own.difference
    span = "" if found.low is None or found.high is None else f"{found.low:+.3f} to {found.high:+.3f}, "
    return f"{found.mean:+.3f} ({span}{found.n} seeds, rate {own.lr:g})"


def dynamics(rows: list[dict[str, Any]]) -> str:
    """One line per case: the time of each solver over that of our adaptive one, which stands first."""
    solvers = list(dict.fromkeys(row["solver"] for row in rows))
    ours = "normlab dopri"
    others = [solver for solver in solvers if solver != ours]
    lines = [f"| case | {ours}, ms | " + " | ".join(others) + " |", "|" + "---|" * (2 + len(others))]
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {row["solver"]: row for row in rows if row["case"] == case}
        cells = [f"{found[solver]['over_normlab']:.2f} ×" for solver in others]
        lines.append(f"| {case} | {1e3 * found[ours]['seconds']:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def heads(rows: list[dict[str, Any]]) -> str:
    """One line per scheme: the loss under each kind of head at each rate, with the first seed."""
    cells = [(head, lr) for head in ("own", "tied", "scaled") for lr in (6e-4, 1.2e-3)]
    found = {(row["scheme"], row["head"], row["lr"]): row for row in reversed(rows) if row["steps"] == _SCREEN}
    schemes = [scheme for scheme in _schemes(rows) if (scheme, "tied", 6e-4) in found]
    titles = ["scheme", *(f"{head}, {lr:g}" for head, lr in cells), "first loss, tied", "token read, tied"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for scheme in schemes:
        tied = found[scheme, "tied", 6e-4]
        losses = [_loss(found.get((scheme, head, lr))) for head, lr in cells]
        lines.append("| " + " | ".join([scheme, *losses, f"{tied['first_loss']:.2f}", f"{tied['read']:.3f}"]) + " |")
    return "\n".join(lines)


def starts(rows: list[dict[str, Any]]) -> str:
    """One line per scheme with a head of its own: runs that are stuck, and the median loss of the others."""
    lines = ["| scheme | first loss | 6e-4: loss | stuck | 1.2e-3: loss | stuck |", "|" + "---|" * 6]
    own = [row for row in rows if row["head"] == "own" and row["steps"] == _SCREEN]
    for scheme in [scheme for scheme in _schemes(own) if "(" not in scheme]:
        mine = [row for row in own if row["scheme"] == scheme]
        cells = [cell for lr in (6e-4, 1.2e-3) for cell in _group([row for row in mine if row["lr"] == lr])]
        lines.append("| " + " | ".join([scheme, f"{mine[0]['first_loss']:.2f}", *cells]) + " |")
    return "\n".join(lines)


def warmups(rows: list[dict[str, Any]]) -> str:
    """One line per scheme that was screened with a longer warm-up as well: stuck runs of each."""
    lines = [
        "| scheme | rate | stuck, 40 steps of warm-up | stuck, 100 steps | their losses after 400 steps |",
        "|" + "---|" * 5,
    ]
    long = [row for row in rows if row["steps"] != _SCREEN]
    for scheme, lr in sorted({(row["scheme"], row["lr"]) for row in long}):
        short, own = (
            [r for r in part if (r["scheme"], r["lr"], r["head"]) == (scheme, lr, "own")] for part in (rows, long)
        )
        cells = [_group([row for row in short if row["steps"] == _SCREEN])[1], _group(own)[1]]
        lines.append(
            f"| {scheme} | {lr:g} | " + " | ".join([*cells, ", ".join(f"{row['loss']:.3f}" for row in own)]) + " |"
        )
    return "\n".join(lines)


def ladder_calibration(rows: list[dict[str, Any]]) -> str:
    """One line per design and estimator: the lowest coverage of any truth at each place, and mean widths."""
    places = {"1x": "top", "3.5x": "3.5 ×", "10x": "10 ×", "top - bottom": "change over the ladder",
              "top - first budget": "change over budgets"}  # fmt: skip
    titles = ["design", "estimator", *places.values(), "forecast", "mean width: top, 3.5 ×, 10 ×"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for case, estimator in dict.fromkeys((row["case"], row["estimator"]) for row in rows):
        own = [row for row in rows if (row["case"], row["estimator"]) == (case, estimator)]
        cells = [_lowest([row for row in own if row["place"] == place]) for place in places]
        forecast = [row for row in own if row["place"].startswith("cell")]
        widths = [[row["width"] for row in own if row["place"] == place] for place in list(places)[:3]]
        mean = " / ".join(f"{statistics.mean(each):.3f}" for each in widths if each)
        mean = mean or f"forecast: {statistics.mean(row['width'] for row in forecast):.3f}"
        name = estimator.replace("_", " ")
        lines.append("| " + " | ".join([case, name, *cells, _lowest(forecast), mean]) + " |")
    return "\n".join(lines)


def published_ladders(rows: list[dict[str, Any]]) -> str:
    """One line per ladder and split: gaps within their forecasts, signs decided, and errors of five guesses."""
    guesses = {
        "smooth": "smooth", "simple_law": "simple law", "last_gap": "nearest cell", "no_gap": "no gap",
        "separate_laws": "two laws",
    }  # fmt: skip
    estimators = {name: guesses[name] for name in ("smooth", "simple_law")}
    titles = ["ladder", "forecast", "cells", "× the top's compute"]
    titles += [f"{name}: within, width" for name in estimators.values()]
    titles += [f"{name}: signs decided, right" for name in estimators.values()]
    titles += [f"error, {name}" for name in guesses.values()]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for group, split in dict.fromkeys((row["group"], row["split"]) for row in rows):
        own = [row | {"no_gap": 0.0} for row in rows if (row["group"], row["split"]) == (group, split)]
        times = [row["times_top"] for row in own]
        cells = [str(len(own)), f"{min(times):.2g} to {max(times):.2g}"]
        cells += [_within(own, name) for name in estimators] + [_signs(own, name) for name in estimators]
        errors = ([_guess(row, name) - row["measured"] for row in own] for name in guesses)
        cells += [f"{statistics.mean(error**2 for error in each) ** 0.5:.4f}" for each in errors]
        lines.append("| " + " | ".join([group, split, *cells]) + " |")
    return "\n".join(lines)


def _within(rows: list[dict[str, Any]], estimator: str) -> str:
    intervals = [(row[estimator]["low"], row["measured"], row[estimator]["high"]) for row in rows]
    inside = sum(low <= measured <= high for low, measured, high in intervals)
    return f"{inside} of {len(rows)}, {statistics.mean(high - low for low, _, high in intervals):.3f}"


def _signs(rows: list[dict[str, Any]], estimator: str) -> str:
    """Intervals without zero, and how many of them lie on the side of what was measured."""
    decided = [row for row in rows if row[estimator]["low"] * row[estimator]["high"] > 0.0]
    return f"{len(decided)}, {sum(row[estimator]['mean'] * row['measured'] > 0.0 for row in decided)}"


def _guess(row: dict[str, Any], name: str) -> float:
    return row[name]["mean"] if isinstance(row[name], dict) else row[name]


def _lowest(rows: list[dict[str, Any]]) -> str:
    return f"{min(row['coverage'] for row in rows):.3f}" if rows else "–"


_SCREEN = 200
"""Steps of a screen; longer runs stand in the same file."""


def _group(rows: list[dict[str, Any]]) -> tuple[str, str]:
    trained = [row["loss"] for row in rows if not row["stuck"]]
    loss = f"{statistics.median(trained):.3f}" if trained else "–"
    return loss, f"{len(rows) - len(trained)} of {len(rows)}"


def _loss(row: dict[str, Any] | None) -> str:
    return "–" if row is None else f"{row['loss']:.3f}" + (" stuck" if row["stuck"] else "")


def _schemes(rows: list[dict[str, Any]]) -> list[str]:
    return sorted({row["scheme"] for row in rows})


def _read(file: Path) -> list[dict[str, Any]]:
    """The rows of a file, or the arms of a study's folder."""
    if file.is_dir():
        return [
            {"name": arm.name, "rows": _read(arm / "rows.jsonl")} | json.loads((arm / "compare.json").read_text())
            for arm in sorted(file.iterdir()) if arm.is_dir()
        ]  # fmt: skip
    text = file.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if file.suffix == ".jsonl" else json.loads(text)["rows"]


def main() -> None:
    page = HERE / "README.md"
    text = page.read_text(encoding="utf-8")
    makers = {
        "kernels": kernels, "step": steps, "model-kernels": model_kernels, "training": training, "dynamics": dynamics,
        "heads": heads, "starts": starts, "warm-ups": warmups, "grid": grid, "rates": rates, "gaps": gaps,
        "ladder-calibration": ladder_calibration, "published-ladders": published_ladders,
    }  # fmt: skip

    def table(match: re.Match[str]) -> str:
        kind, name = match["kind"], match["name"]
        rows = _read(HERE / "results" / name)
        return f"<!-- {kind}: {name} -->\n{makers[kind](rows)}\n<!-- end -->"

    pattern = r"<!-- (?P<kind>[a-z-]+): (?P<name>\S+) -->\n.*?<!-- end -->"
    page.write_text(re.sub(pattern, table, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
