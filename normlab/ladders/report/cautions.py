"""Cautions about a ladder: rates at an edge, rates carried by a hypothesis, repeated text, missing schemes."""

from __future__ import annotations

from normlab.compare.tuning import edge_text
from normlab.ladders.report.content import LadderReport
from normlab.ladders.statistics.answer import place_name
from normlab.ladders.statistics.cautions import unpaired
from normlab.pages.numbers import join_names, minus, rate
from normlab.utils.text import counted

_BY_RULE = {
    "hypothesis": " by a rule that is a hypothesis",
    "fitted": " by a power that was fitted at one middle size",
}


def cautions(content: LadderReport) -> list[str]:
    """All cautions, those of the statistics first."""
    found = [
        *_unfinished(content),
        *map(minus, content.answer.cautions),
        *_edges(content),
        *_missing_at_top(content),
        *_lost(content),
        *_unpaired(content),
        *_repeated(content),
        *_hypotheses(content),
        *content.design.cautions,
    ]
    return list(dict.fromkeys(found))


def _unfinished(content: LadderReport) -> list[str]:
    left = content.design.runs_left
    return (
        [f"The ladder is not finished: at least {counted(left, 'run')} left. What is said here may change."]
        if left
        else []
    )


def _edges(content: LadderReport) -> list[str]:
    alike: dict[tuple[str, float], list[str]] = {}
    for search in content.design.rates:
        if search.edge and search.pick is not None:
            where = f"{search.scheme} at {place_name(search.size, search.tokens)}"
            words = edge_text(search.pick, search.edge, [search.pick, *(own.lr for own in search.tried)])
            alike.setdefault((words, search.pick), []).append(where)
    return [
        f"The picked rate of {join_names(places)} is {words} ({rate(lr)}): a better one may lie beyond it."
        for (words, lr), places in alike.items()
    ]


def _missing_at_top(content: LadderReport) -> list[str]:
    top = content.top
    if top is None:
        return []
    absent = [own.scheme for own in content.answer.schemes if not content.has_trained(own.scheme, top)]
    verb = "has" if len(absent) == 1 else "have"
    return [f"{join_names(absent)} {verb} no run that trained at {top.name}, {content.top_words}."] if absent else []


def _lost(content: LadderReport) -> list[str]:
    if not content.lost:
        return []
    what, are = f"{counted(len(content.lost), 'run')} did not train", "it is" if len(content.lost) == 1 else "they are"
    return [f"{what[0].upper()}{what[1:]}: {are} listed below and part of no gap and no fit."]


def _unpaired(content: LadderReport) -> list[str]:
    """While runs are left, their partners may yet come."""
    schemes = [] if content.design.runs_left else content.schemes[1:]
    return [f"{line}." for scheme in schemes if (line := unpaired(content.rows, scheme, content.answer.baseline))]


def _repeated(content: LadderReport) -> list[str]:
    seen = [(cell.epochs, cell) for cell in content.cells if cell.epochs is not None and cell.epochs > 1.0]
    if not seen:
        return []
    most = max(epochs for epochs, _ in seen)
    if len(seen) == len(content.cells):
        return [f"Every cell saw its text more than once (up to {most:.2g} times): gaps on fresh text may differ."]
    return [
        f"{len(seen)} of {len(content.cells)} cells saw the text more than once (up to {most:.2g} times): "
        "gaps on fresh text may differ."
    ]


def _hypotheses(content: LadderReport) -> list[str]:
    """Cautions on rates carried by a rule that is not derived; schemes with the same text share a line."""
    alike: dict[str, list[str]] = {}
    for rule in content.design.rules:
        if rule.basis != "derived":
            alike.setdefault(rule.basis, []).append(rule.scheme)
    return [
        f"The rates of {join_names(names)} were carried to other sizes{_BY_RULE.get(basis, f': {basis}')}."
        for basis, names in alike.items()
    ]
