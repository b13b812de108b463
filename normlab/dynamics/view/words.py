"""Text on the page of a simulation: headline, findings, and the schemes with their laws, in plain words."""

from __future__ import annotations

from normlab.dynamics.measure.fits import RateForm
from normlab.dynamics.result import SchemeRun, Simulation
from normlab.dynamics.view.plots import run_labels

WHY = (
    "Attention pulls tokens towards each other, and once they all point the same way (collapse) the layers that follow "
    "can no longer tell one word from another. From there on depth costs compute and adds nothing, so how fast a "
    "scheme lets tokens gather decides how many of its layers can be useful."
)
"""Why collapse matters, in two sentences."""

_FORMS: dict[RateForm, str] = {
    "exponential": "by the same factor in every layer: fast",
    "stretched": "by a factor that shrinks as layers go by",
    "power": "as a power of the number of layers: slowly",
}

LAWS = (
    "Once tokens have nearly gathered, the squared distance between them follows a simple law of the number of layers "
    "t. Under e^(a t) it shrinks by the same factor in every layer. Under t^a, a power of t, it shrinks ever more "
    "slowly, so that late layers still see different tokens; e^(a √t) lies between. Theory predicts the law and the "
    "number a from the scheme's equation alone."
)
"""How to read the table of laws."""


def headline(simulation: Simulation) -> str:
    """One sentence that summarises the simulation."""
    named = list(zip(run_labels(simulation), simulation.runs, strict=True))
    if not all("cosine" in run.bands for _, run in named):
        return ""
    layers = f"{simulation.config.get('time', named[0][1].times[-1]):g} layers"
    ranked = sorted(named, key=lambda pair: -pair[1]["cosine"].mean[-1])
    (most, first), (least, last) = ranked[0], ranked[-1]
    if len(ranked) == 1:
        begin, end = first["cosine"].mean[0], first["cosine"].mean[-1]
        change = f"the mean cosine of two tokens goes from {begin:.2f} to {end:.2f}"
        return f"{most}: within {layers} {change} (1: all tokens alike)."
    ends = [f"{run['cosine'].mean[-1]:.2f}" for run in (first, last)]
    if ends[0] == ends[1]:
        return f"After {layers} all have the same mean cosine of two tokens, {ends[0]} (1: all tokens alike)."
    return (
        f"After {layers} the tokens of {most} are most alike (mean cosine {ends[0]}; 1: all the same), "
        f"those of {least} least ({ends[1]})."
    )


def tail_findings(simulation: Simulation) -> list[str]:
    """For each run a sentence on how fast its tokens gather late in the run, and what theory predicts."""
    return [
        f"{label}: {words}"
        for label, run in zip(run_labels(simulation), simulation.runs, strict=True)
        if (words := _tail_words(run))
    ]


def _tail_words(run: SchemeRun) -> str:
    fitted = next((fit for fit in run.fits if fit.observable == "variance"), None)
    if fitted is not None:
        theory = f"theory predicts {run.tail}" if run.tail else "theory has no prediction"
        formula, how = fitted.rate.formula, _FORMS[fitted.rate.form]
        return f"late in the run the squared distance of tokens from their mean falls as {formula}, {how}; {theory}."
    if run.tail is None:
        return ""
    law = f"{run.tail}, {_FORMS[run.tail.form]}"
    return f"tokens have not gathered by the end; theory predicts that their squared distance then falls as {law}."


def scheme_words(simulation: Simulation) -> list[tuple[int, str, str]]:
    """Place, label and description of every run whose scheme NormLab knows; nobody's file is loaded for it."""
    from normlab.schemes.catalog.card import Card
    from normlab.schemes.catalog.registry import list_schemes, scheme

    known = set(list_schemes())
    found = []
    for place, (label, run) in enumerate(zip(run_labels(simulation), simulation.runs, strict=True)):
        name = run.scheme.partition("(")[0]
        if name in known:
            card = Card.of(scheme(name))
            found.append((place, label, f"{card.title}: {card.summary}"))
    return found
