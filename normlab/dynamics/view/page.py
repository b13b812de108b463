"""HTML page of a simulation (animated tokens, observables, fitted laws) or of an experiment."""

from __future__ import annotations

import shlex
from typing import Any

from normlab.dynamics.experiments.result import ExperimentResult, PredictionVerdict
from normlab.dynamics.result import Simulation
from normlab.dynamics.view import tables
from normlab.dynamics.view.plots import figures_data, observable_panels, run_labels, simulation_data
from normlab.dynamics.view.words import LAWS, WHY, headline, scheme_words, tail_findings
from normlab.pages.numbers import duration, join_names
from normlab.pages.page import Section, install_command, render, section

_STYLES = ("simulate/simulate.css",)
_CAUTION = (
    "This is theory: attention and the scheme alone, without positions, and without MLPs unless the configuration "
    "below adds them. The command normlab simulate real-model shows how near a trained network comes to it."
)


def render_result(result: Simulation | ExperimentResult) -> str:
    """The HTML page of a simulation or experiment."""
    return simulation_page(result) if isinstance(result, Simulation) else result_page(result)


def simulation_page(simulation: Simulation) -> str:
    """The HTML page of a simulation."""
    names = list(dict.fromkeys(run.scheme for run in simulation.runs))
    data = simulation_data(simulation)
    return render(
        f"Tokens through the layers under {join_names(names)}",
        _simulation_sections(simulation, data),
        data,
        headline=headline(simulation),
        cautions=(_CAUTION,),
        facts=_simulation_facts(simulation),
        styles=_STYLES,
        scripts=("simulate/stage.js", "simulate/simulate.js"),
    )


def result_page(result: ExperimentResult) -> str:
    """The HTML page of an experiment."""
    return render(
        f"{result.experiment}: {result.about}",
        [
            *_figures(result),
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
    return [*install_command(result.versions), shlex.join(result.command)] if result.command else []


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
    options, betas = simulation.config, sorted({run.beta for run in simulation.runs})
    words = {"tokens": "tokens", "dim": "dimensions", "seeds": "random starts", "weights": "attention weights"}
    facts = [(words[name], str(options[name])) for name in words if name in options]
    facts.insert(2, ("sharpness of attention β", ", ".join(f"{beta:g}" for beta in betas)))
    return [*facts, ("computed in", duration(simulation.seconds))]


def _simulation_sections(simulation: Simulation, data: dict[str, Any]) -> list[Section]:
    shown = {
        place: [panel for panel in observable_panels(simulation) if panel.place == place]
        for place in ("beside", "main", "more")
    }
    runs = simulation.runs
    fitted = {fit.observable for run in runs for fit in run.fits}
    return [
        section(
            "sphere", "Tokens on the sphere", "simulate/stage.html", names=run_labels(simulation),
            beside=shown["beside"], why=WHY, schemes=scheme_words(simulation), opening=data["opening"],
            moving=all(run.paths for run in runs), last=len(runs[0].times) - 1,
            drawn=len(runs[0].paths[0]) if runs[0].paths else 0,
            tokens=simulation.config.get("tokens"), dim=simulation.config.get("dim", 3), explained=simulation.explained,
            laws="variance" in fitted, seeds=simulation.config.get("seeds", 1),
        ),
        section(
            "laws", "How fast tokens gather", "simulate/laws.html", table=tables.law_table(simulation), words=LAWS,
            findings=tail_findings(simulation),
        ),
        section(
            "observables", "Layer by layer", "simulate/observables.html", main=shown["main"], more=shown["more"],
            names=run_labels(simulation), histogram=all(run.histogram for run in runs),
            table=tables.run_table(simulation), seeds=simulation.config.get("seeds", 1),
            laws=bool(fitted - {"variance"}),
        ),
        *_merges(simulation),
        *_notes(simulation),
        *_end(simulation),
    ]  # fmt: skip


def _merges(simulation: Simulation) -> list[Section]:
    table = tables.merge_table(simulation)
    return [section("merges", "When clusters merge", "simulate/merges.html", table=table)] if table.rows else []


def _notes(simulation: Simulation) -> list[Section]:
    """Remarks of the schemes' laws, for those who know the theory."""
    notes = simulation.notes
    return [section("notes", "Remarks", "simulate/notes.html", notes=notes)] if notes else []


def _figures(result: ExperimentResult) -> list[Section]:
    figures = result.figures
    return [section("figures", "Figures", "simulate/figures.html", figures=figures)] if figures else []


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
