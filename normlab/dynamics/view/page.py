"""HTML page of a simulation (animated tokens, observables, fitted laws) or of an experiment."""

from __future__ import annotations

import shlex
from typing import Any

from normlab.dynamics.experiments.result import ExperimentResult, PredictionVerdict
from normlab.dynamics.result import SchemeRun, Simulation
from normlab.dynamics.view import tables
from normlab.dynamics.view.plots import figures_data, observable_panels, run_labels, simulation_data
from normlab.pages.numbers import duration, join_names
from normlab.pages.page import Section, render, section

_STYLES = ("simulate/simulate.css",)


def render_result(result: Simulation | ExperimentResult) -> str:
    """The HTML page of a simulation or experiment."""
    return simulation_page(result) if isinstance(result, Simulation) else result_page(result)


def simulation_page(simulation: Simulation) -> str:
    """The HTML page of a simulation."""
    names = list(dict.fromkeys(run.scheme for run in simulation.runs))
    data = simulation_data(simulation)
    return render(
        f"Simulation of {join_names(names)}",
        _simulation_sections(simulation, data),
        data,
        headline=headline(simulation),
        findings=tail_findings(simulation),
        cautions=simulation.notes,
        facts=_simulation_facts(simulation),
        styles=_STYLES,
        scripts=("simulate/stage.js", "simulate/simulate.js"),
    )


def result_page(result: ExperimentResult) -> str:
    """The HTML page of an experiment."""
    return render(
        f"{result.experiment}: {result.about}",
        [
            section("figures", "Figures", "simulate/figures.html", figures=result.figures),
            section("results", "Results", "table.html", table=tables.result_table(result)),
            *_verdicts(result),
            *_end(result),
        ],
        figures_data(result.figures),
        headline=agreement_sentence(result),
        tone="" if not _judged(result) else "ok" if result.agrees else "fail",
        findings=[verdict.sentence for verdict in result.verdicts if _is_news(verdict, result)],
        cautions=result.notes,
        facts=_result_facts(result),
        styles=_STYLES,
        scripts=("simulate/figures.js",),
    )


def headline(simulation: Simulation) -> str:
    """One sentence that summarises the simulation."""
    named = [(label, run) for label, run in zip(run_labels(simulation), simulation.runs, strict=True)]
    if not all("cosine" in run.bands for _, run in named):
        return ""
    horizon = f"{simulation.config.get('time', named[0][1].times[-1]):g}"
    ranked = sorted(named, key=lambda pair: -pair[1]["cosine"].mean[-1])
    (most, first), (least, last) = ranked[0], ranked[-1]
    if len(ranked) == 1:
        begin, end = first["cosine"].mean[0], first["cosine"].mean[-1]
        return f"{most}: the mean cosine of two tokens goes from {begin:.2f} to {end:.2f} by time {horizon}."
    ends = [f"{run['cosine'].mean[-1]:.2f}" for run in (first, last)]
    if ends[0] == ends[1]:
        return f"All end at a mean cosine of {ends[0]} at time {horizon}."
    return f"By time {horizon} {most} has gathered its tokens most (mean cosine {ends[0]}), {least} least ({ends[1]})."


def tail_findings(simulation: Simulation) -> list[str]:
    """For each run a sentence on the fitted and the predicted tail."""
    return [
        f"{label}: {words}"
        for label, run in zip(run_labels(simulation), simulation.runs, strict=True)
        if (words := _tail_words(run))
    ]


def _tail_words(run: SchemeRun) -> str:
    fitted = next((fit for fit in run.fits if fit.observable == "variance"), None)
    theory = f"theory predicts {run.tail}" if run.tail else "theory predicts nothing"
    if fitted is not None:
        return f"the variance falls as {fitted.rate}; {theory}"
    return f"no tail up to this time; {theory} later" if run.tail else ""


def agreement_sentence(result: ExperimentResult) -> str:
    """One sentence on how many predictions hold."""
    judged = _judged(result)
    right = sum(verdict.agrees is True for verdict in result.verdicts)
    if not judged:
        return f"Measured, without a prediction: {len(result.verdicts)} numbers." if result.verdicts else ""
    if right == judged:
        return "The one prediction holds." if right == 1 else f"All {right} predictions hold."
    return f"{right} of {judged} predictions hold."


def reproduce_commands(result: Simulation | ExperimentResult) -> list[str]:
    """Commands that reproduce the result."""
    packages = [f"{name}=={result.versions[name]}" for name in ("normlab", "torch") if name in result.versions]
    install = [f"pip install {shlex.join(packages)}"] if packages else []
    return [*install, shlex.join(result.command)] if result.command else []


def _is_news(verdict: PredictionVerdict, result: ExperimentResult) -> bool:
    """Whether a verdict disagrees; without any prediction every verdict is shown."""
    return verdict.agrees is False or not _judged(result)


def _judged(result: ExperimentResult) -> int:
    return sum(verdict.agrees is not None for verdict in result.verdicts)


def _result_facts(result: ExperimentResult) -> list[tuple[str, str]]:
    options = result.config
    facts = [(name, str(options[name])) for name in ("tokens", "seeds", "method") if name in options]
    schemes = list(options.get("scheme", ()))
    named = join_names(schemes) if 0 < len(schemes) <= 6 else str(len(schemes))
    return [("schemes", named), *facts, ("time", duration(result.seconds))]


def _simulation_facts(simulation: Simulation) -> list[tuple[str, str]]:
    options = simulation.config
    names = ("tokens", "dim", "seeds", "weights", "method")
    facts = [(name, str(options[name])) for name in names if name in options]
    betas = sorted({run.beta for run in simulation.runs})
    facts.insert(2, ("β", ", ".join(f"{beta:g}" for beta in betas)))
    return [*facts, ("time", duration(simulation.seconds))]


def _simulation_sections(simulation: Simulation, data: dict[str, Any]) -> list[Section]:
    shown = {
        place: [panel for panel in observable_panels(simulation) if panel.place == place]
        for place in ("beside", "main", "more")
    }
    runs = simulation.runs
    fitted = {fit.observable for run in runs for fit in run.fits}
    return [
        section(
            "sphere", "On the sphere", "simulate/stage.html", names=run_labels(simulation), beside=shown["beside"],
            moving=all(run.paths for run in runs), last=len(runs[0].times) - 1,
            drawn=len(runs[0].paths[0]) if runs[0].paths else 0,
            tokens=simulation.config.get("tokens"), dim=simulation.config.get("dim", 3), explained=simulation.explained,
            laws="variance" in fitted, seeds=simulation.config.get("seeds", 1),
        ),
        section("laws", "Laws", "table.html", table=tables.law_table(simulation)),
        section(
            "observables", "Observables", "simulate/observables.html", main=shown["main"], more=shown["more"],
            names=run_labels(simulation), histogram=all(run.histogram for run in runs),
            table=tables.run_table(simulation), seeds=simulation.config.get("seeds", 1),
            laws=bool(fitted - {"variance"}),
        ),
        *_merges(simulation),
        *_end(simulation),
    ]  # fmt: skip


def _merges(simulation: Simulation) -> list[Section]:
    table = tables.merge_table(simulation)
    return [section("merges", "Merge times", "simulate/merges.html", table=table)] if table.rows else []


def _verdicts(result: ExperimentResult) -> list[Section]:
    if not result.verdicts:
        return []
    return [section("verdicts", "Against the prediction", "table.html", table=tables.verdict_table(result))]


def _end(result: Simulation | ExperimentResult) -> list[Section]:
    return [
        section(
            "configuration", "Configuration", "configuration.html",
            config=tables.config_table(result), environment=tables.environment_table(result),
        ),
        section("reproduce", "How to reproduce", "reproduce.html", commands=reproduce_commands(result)),
    ]  # fmt: skip
