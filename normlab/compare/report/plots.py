"""Plot data of the HTML report as JSON: ranking, training curves, learning rates and depth profiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from normlab.compare.report.budget import unit_of, units_a_token
from normlab.compare.report.results import ReportedRun, Results
from normlab.compare.report.run_metrics import PROFILES, Columns, Record, metric_columns, profile_values, with_seconds
from normlab.pages.numbers import finite_or_none
from normlab.utils.spaced import evenly_spaced

POINTS_A_CURVE = 1000
POINTS_IN_ALL = 80_000  # about 2.5 MB of text, beside 5 MB of plotly.js
PROFILE_STEPS = 40
PLACES = ("step", "tokens", "seconds")


def plot_data(results: Results, smoothing: float) -> dict[str, Any]:
    """All data that the page's script reads."""
    return {
        "schemes": [_scheme(results, scheme) for scheme in results.schemes],
        "metric": results.metric.axis,
        "higher": results.metric.higher,
        "budget": unit_of(results).capitalize(),
        "axes": {"train": "Training loss (nats)", "eval": results.metric.axis},
        "smoothing": smoothing,
        "ranking": _ranking(results),
        "curves": _curves(results),
        "rates": _rates(results),
        "profiles": _profiles(results),
    }


def _scheme(results: Results, scheme: str) -> dict[str, Any]:
    standing = results.scheme_result(scheme)
    rate = standing.lr if standing else None
    return {"label": results.label(scheme), "baseline": scheme == results.baseline, "lr": rate}


def _ranking(results: Results) -> list[dict[str, Any]]:
    return [
        {
            "scheme": results.schemes.index(own.scheme),
            "mean": own.difference.mean if own.difference else 0.0,
            "low": own.difference.low if own.difference else None,
            "high": own.difference.high if own.difference else None,
            "verdict": own.verdict,
        }
        for own in results.standings
        if own.difference is not None or own.verdict == "baseline"
    ]


def _curves(results: Results) -> list[dict[str, Any]]:
    limit = min(POINTS_A_CURVE, max(50, POINTS_IN_ALL // max(1, len(results.runs))))
    strides = [_stride([len(getattr(run.metrics, kind)) for run in results.runs], limit) for kind in ("step", "eval")]
    return [_curve(results, run, *strides) for run in results.runs if run.metrics.step or run.metrics.eval]


def _stride(lengths: Sequence[int], limit: int) -> int:
    """Stride common to all runs, so that two seeds have points at the same steps."""
    return max(1, math.ceil(max(lengths, default=0) / limit))


def _curve(results: Results, run: ReportedRun, train_stride: int, eval_stride: int) -> dict[str, Any]:
    evaluations, share = with_seconds(run.metrics.step, run.metrics.eval), units_a_token(run)
    return {
        "scheme": results.schemes.index(run.scheme),
        "lr": run.lr,
        "seed": run.seed,
        "role": run.role,
        "lost": run.is_lost,
        "train": _points(run.metrics.step, "loss", train_stride, share),
        "eval": _points(evaluations, results.metric.field, eval_stride, share),
    }


def _points(records: Sequence[Record], field: str, stride: int, share: float) -> Columns:
    """`share`: images for each token; the place of a point on the axis of the budget counts them."""
    columns = metric_columns(records, (*PLACES, field), stride)
    columns["tokens"] = [None if number is None else number * share for number in columns["tokens"]]
    found = _rounded(columns)
    return {**{name: found[name] for name in PLACES}, "value": found[field]}


def _rates(results: Results) -> list[dict[str, Any]]:
    return [
        {
            "scheme": results.schemes.index(run.scheme), "lr": run.lr, "seed": run.seed, "role": run.role,
            "value": run.value if run.state == "done" else None, "stuck": run.is_stuck,
        }
        for run in results.runs
        if run.role is not None and run.lr is not None and run.state in ("done", "failed")
    ]  # fmt: skip


def _profiles(results: Results) -> dict[str, Any]:
    """Mean over the chosen runs of each scheme, by step and block boundary."""
    chosen = {k: results.chosen(scheme) for k, scheme in enumerate(results.schemes)}
    steps = sorted({int(p["step"]) for runs in chosen.values() for run in runs for p in run.metrics.profile})
    shown = [steps[k] for k in evenly_spaced(len(steps), PROFILE_STEPS)]
    series = [
        {"scheme": k, "step": step, **_profile(runs, step)}
        for k, runs in chosen.items()
        for step in shown
        if any(p["step"] == step for run in runs for p in run.metrics.profile)
    ]
    # Runs of version 0.1 recorded three of the series.
    names = [name for name in PROFILES if any(entry[name] for entry in series)]
    return {"steps": shown, "names": names, "series": series}


def _profile(runs: Sequence[ReportedRun], step: int) -> dict[str, Any]:
    records = [record for run in runs for record in run.metrics.profile if record["step"] == step]
    found: dict[str, Any] = {}
    for name in PROFILES:
        tables = [profile_values(record, name) for record in records]
        layers = sorted({layer for table in tables for layer in table})
        found[name] = [[layer, _round(_mean([t[layer] for t in tables if layer in t]))] for layer in layers]
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _rounded(table: Columns) -> Columns:
    return {name: [_round(value) for value in values] for name, values in table.items()}


def _round(value: float | None) -> float | None:
    """Round floats to five significant digits, more than a screen shows; integers stay exact."""
    found = finite_or_none(value)
    if found is None:
        return None
    return int(found) if float(found).is_integer() else float(f"{found:.5g}")
