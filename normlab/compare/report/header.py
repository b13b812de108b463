"""Header of the report: data, model size, token budget, validation set, device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normlab.compare.report.budget import trained_on, unit_of
from normlab.compare.report.results import ReportedRun, Results, find_field
from normlab.errors import NormLabError
from normlab.pages.numbers import NONE, finite_or_none, format_count, join_names, rate

Facts = list[tuple[str, str]]


def header_facts(results: Results) -> Facts:
    """Model, data, token budget and device, as far as they were recorded."""
    own = _about_run(results.runs[0]) if results.kind == "run" else _about_runs(results.runs)
    found = [*own, *_about_model(results), *_about_data(results), *_about_work(results)]
    return [(name, text) for name, text in found if text]


def _about_run(run: ReportedRun) -> Facts:
    state = "stuck" if run.is_stuck else run.state
    known = {"scheme": run.label, "state": state, "rate": rate(run.lr), "seed": str(run.seed)}
    return [(name, value) for name, value in known.items() if value not in (NONE, "None")]


def _about_runs(runs: list[ReportedRun]) -> Facts:
    counts = {
        "failed": sum(run.has_failed for run in runs),
        "stuck": sum(run.is_stuck for run in runs),
        "interrupted": sum(run.state == "interrupted" for run in runs),
    }
    return [("runs", ", ".join([f"{len(runs)}", *(f"{n} {name}" for name, n in counts.items() if n)]))]


def _about_model(results: Results) -> Facts:
    depth, width = (find_field(results.about, name) for name in ("depth", "dim"))
    if depth is None or width is None:
        config = next((run.config for run in results.runs if run.config), {})
        depth, width = find_field(config, "depth"), find_field(config, "dim")
    shape = f"{depth} × {width}" if finite_or_none(depth) and finite_or_none(width) else ""
    return [("depth × width", shape), ("parameters", _parameters(results))]


def _parameters(results: Results) -> str:
    """Range over all schemes; they differ by a few gains, which three digits do not show."""
    recorded = results.about.get("parameters")
    numbers = [n for n in recorded.values() if finite_or_none(n)] if isinstance(recorded, Mapping) else []
    numbers = numbers or [n for n in (_counted_anew(results),) if n]
    return " to ".join(dict.fromkeys(format_count(n) for n in (min(numbers), max(numbers)))) if numbers else ""


def _counted_anew(results: Results) -> int | None:
    """Number of parameters computed from the configuration, for comparisons of version 0.1, which did not record it."""
    entries = finite_or_none(find_field(results.about.get("corpus"), "vocab_size"))
    config = next((run.config for run in results.runs if run.config), None)
    if config is None or entries is None:
        return None
    from normlab.models.estimate import num_params
    from normlab.train.config import TrainConfig
    from normlab.train.tasks.text import VOCABULARY_MULTIPLE

    padded = VOCABULARY_MULTIPLE * -(-int(entries) // VOCABULARY_MULTIPLE)
    try:
        return num_params(TrainConfig.from_dict(config | {"model": config["model"] | {"vocab_size": padded}}).model)
    except (NormLabError, KeyError, TypeError):
        return None


def _about_data(results: Results) -> Facts:
    corpus = results.about.get("corpus")
    if not isinstance(corpus, Mapping):
        names = find_field(results.about, "data")
        return [("data", ", ".join(map(str, names)) if isinstance(names, list) else "")]
    return [("data", str(corpus.get("source") or "")), ("validation set", _validation(results, corpus))]


def _validation(results: Results, corpus: Mapping[str, Any]) -> str:
    """Size of the validation set, and how much of it an evaluation reads."""
    side = corpus.get("val")
    if not isinstance(side, Mapping):
        return ""
    images, tokens, most = (
        side.get("images"),
        finite_or_none(side.get("tokens")),
        finite_or_none(find_field(results.about, "eval_tokens")),
    )
    if tokens is None:
        return f"{format_count(images)} images" if images else ""
    seen = f"{format_count(most)} of " if most and most < tokens else ""
    return f"{seen}{format_count(tokens)} tokens"


def _about_work(results: Results) -> Facts:
    known = sorted({number for run in results.runs if run.state == "done" and (number := trained_on(run))})
    devices = list(dict.fromkeys(str(d) for run in results.runs if (d := run.row.get("device"))))
    ends = dict.fromkeys(format_count(number) for number in (known[0], known[-1])) if known else {}
    return [(f"{unit_of(results)} a run", " to ".join(ends)), ("device", join_names(devices) if devices else "")]
