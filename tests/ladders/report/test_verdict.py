"""Headline, findings and cautions of a ladder."""

from __future__ import annotations

from dataclasses import replace

import pytest

from normlab.ladders.report import LadderReport
from normlab.ladders.report.cautions import cautions
from normlab.ladders.report.design import ForecastFacts, LadderDesign, RateRule
from normlab.ladders.report.forecast_notes import forecast_notes
from normlab.ladders.report.verdict import (
    findings,
    forecast_sentence,
    headline,
    hit_words,
    irreducible_sentence,
    reasons,
)
from normlab.ladders.statistics import EdgeRate, answer
from normlab.ladders.statistics.answer import HeldOut, Interval, Place, Verdict
from normlab.pages.numbers import format_count
from tests.ladders.report import answers, synthetic
from tests.ladders.report.reports import full, table_only


def test_the_headline_says_who_is_better_at_the_top_and_how_the_gap_moved() -> None:
    schemes = ("pre", "peri", "geonorm")
    rows = synthetic.rows(schemes=schemes, lost=False)
    said = headline(LadderReport(rows, answers.answer(rows)))
    assert said == (
        "At the top of the ladder (12x768, 118M tokens) peri is better than pre, by fewer nats with more compute; "
        "geonorm is worse than pre, but was better with less compute."
    )


@pytest.mark.parametrize(
    ("verdict", "drift", "words"),
    [
        (
            "shrinks",
            (-0.02, 0.03),
            ", by fewer nats with more compute, but a change of the compute multiplier is not shown.",
        ),
        ("grows", (0.02, 0.05), ", by more nats with more compute, and the compute multiplier rises."),
        ("constant", (0.02, 0.05), ", by the same within 0.010 nats throughout, while the compute multiplier rises."),
        ("constant", (-0.02, 0.03), ", by the same within 0.010 nats throughout."),
        ("not shown", (-0.05, -0.02), ", and the compute multiplier falls with more compute."),
        ("not shown", (-0.05, 0.02), "."),
    ],
)
def test_the_headline_says_nats_and_compute(verdict: Verdict, drift: tuple[float, float], words: str) -> None:
    """A gap that shrinks with a constant multiplier is no loss of advantage."""
    rows = synthetic.rows(schemes=("pre", "peri"), lost=False)
    found = answers.answer(rows)
    (own,) = found.schemes
    assert own.trend.compute is not None
    change = Interval(-0.02, -0.01, -0.015, 0.95)
    moved = Interval(*drift, sum(drift) / 2, 0.95)
    test = replace(own.trend.compute, verdict=verdict, change=change, log_multiplier_change=moved)
    trend = replace(own.trend, verdict=verdict, compute=test)
    said = headline(LadderReport(rows, replace(found, schemes=[replace(own, trend=trend)])))
    assert said == f"At the top of the ladder (12x768, 118M tokens) peri is better than pre{words}"


def test_what_is_left_below_a_lost_top_is_not_called_the_top() -> None:
    rows = [
        replace(row, state="diverged", loss=None) if (row.size, row.tokens) == ("12x768", 118_000_000) else row
        for row in synthetic.rows(schemes=("pre", "peri"), lost=False)
    ]
    report = LadderReport(rows, answer(rows, baseline="pre"))
    assert headline(report).startswith("At the largest cell with a gap (12x768, 59M tokens) peri is better than pre")


def test_a_gap_that_faded_is_said_to_have_been_there() -> None:
    rows = synthetic.rows(schemes=("pre", "peri"), lost=False)
    report = LadderReport(rows, answers.answer(rows))
    own = report.answer.schemes[0]
    faded = [replace(cell, gap=Interval(-0.01, 0.01, 0.0, 0.95)) if cell == own.top else cell for cell in own.cells]
    answer = replace(report.answer, schemes=[replace(own, cells=faded)])
    said = headline(LadderReport(rows, answer))
    assert said.endswith("no difference to pre is shown for peri, though it was better with less compute.")


def test_schemes_of_which_the_same_is_said_share_a_clause() -> None:
    rows = synthetic.rows(schemes=("pre", "peri", "peri(step=0.1)"), lost=False)
    report = LadderReport(rows, answers.answer(rows, fitted=False))
    assert "peri and peri(step=0.1) are better than pre." in headline(report)


def test_few_seeds_of_one_cell_do_not_make_two_schemes_alike() -> None:
    """Without a fit, two seeds leave open what differences far below zero may be: that is not "no difference"."""
    far = {1: -0.6, 2: -0.4}
    rows = [
        replace(row, loss=3.0 + far[row.seed] * (row.scheme != "pre"))
        for row in synthetic.rows(schemes=("pre", "peri"), lost=False)
        if row.seed in far
    ]
    said = headline(LadderReport(rows, answer(rows, baseline="pre")))
    assert said.endswith("(12x768, 118M tokens) its seeds alone do not show on which side of pre peri is.")


def test_one_seed_is_no_evidence() -> None:
    said = headline(table_only())
    assert said == "At the top of the ladder (8x512, 118M tokens) one seed is no evidence for or against peri."


def test_a_scheme_missing_at_the_top_is_named() -> None:
    kept = [row for row in synthetic.rows(lost=False) if (row.scheme, row.size) != ("geonorm", synthetic.TOP)]
    report = LadderReport(kept, answers.answer(kept))
    assert "geonorm was not judged there" in headline(report)
    assert "geonorm has no run that trained at 12x768, 118M tokens, the top of the ladder." in cautions(report)


def test_a_scheme_that_did_not_train_beyond_its_gain_is_not_just_better() -> None:
    """It is ahead at the smallest size, and its runs at all larger ones are lost: the verdict says both."""
    rows = [
        replace(row, state="stuck", loss=3.5) if row.scheme == "post" and row.size != "4x256" else row
        for row in synthetic.rows(schemes=("pre", "post"), lost=False)
    ]
    lost = [row for row in rows if row.state == "stuck"]
    top = max(row.flops for row in rows if row.size == "4x256")
    beyond = sum(row.flops > top for row in lost)
    assert 0 < beyond < len(lost)
    report = LadderReport(rows, answer(rows, baseline="pre"))
    said = headline(report)
    assert "(4x256, 118M tokens) post is better than pre" in said
    assert said.endswith(f", but {beyond} of {beyond} runs with more compute did not train.")
    runs = sum(row.scheme == "post" for row in rows)
    told = f"; {len(lost)} of its {runs} runs did not train, among them some at every cell with more compute; "
    assert told in findings(report)[0]


def test_a_scheme_that_lost_a_run_at_the_top_is_not_silently_left_out() -> None:
    rows = [
        replace(row, state="diverged", loss=None)
        if (row.scheme, row.size, row.tokens, row.seed) == ("peri", "12x768", 118_000_000, 1)
        else row
        for row in synthetic.rows(schemes=("pre", "peri", "geonorm"), lost=False)
    ]
    report = LadderReport(rows, answer(rows, baseline="pre"))
    assert headline(report).endswith("peri was not judged there (1 of 2 runs did not train).")
    said = "runs did not train, among them some at every cell with more compute;"
    assert f"; 1 of its {sum(row.scheme == 'peri' for row in rows)} {said}" in findings(report)[0]


def test_a_scheme_of_which_no_run_trained_says_so() -> None:
    rows = [
        replace(row, state="stuck", loss=3.5) if row.scheme == "post" else row
        for row in synthetic.rows(schemes=("pre", "post"), lost=False)
    ]
    (said, *_) = findings(LadderReport(rows, answer(rows, baseline="pre")))
    lost = sum(row.scheme == "post" for row in rows)
    assert said == f"post: no cell of the ladder can be compared with pre; {lost} of its {lost} runs did not train."


def test_no_scheme_with_a_pair_gives_no_verdict() -> None:
    rows = [row for row in synthetic.rows(lost=False) if row.scheme == "pre"]
    report = LadderReport(rows, answers.answer(rows))
    assert headline(report) == "No verdict: a gap needs two schemes, and only pre has runs that ended."
    apart = [replace(row, scheme="peri", seed=row.seed + 10) for row in rows]
    report = LadderReport([*rows, *apart], answer([*rows, *apart], baseline="pre"))
    assert headline(report) == "No verdict: no cell counts; the cautions say why."


def test_findings_have_a_sentence_for_each_scheme_and_one_on_the_forecast() -> None:
    found = findings(full())
    assert len(found) == 3 + 1
    assert found[0].startswith("peri: gap ")
    assert found[3] == "8 of 9 forecasts made before the runs held; 8 of 9 held that assume a simple law."


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (-0.02, "hit: inside"),
        (0.03, "miss: 0.020 higher than forecast"),
        (-0.05, "miss: 0.010 lower than forecast"),
        (None, "not known yet"),
    ],
)
def test_a_forecast_against_its_result_in_words(measured: float | None, words: str) -> None:
    assert hit_words(_held_out(measured), places=3) == words


def test_a_forecast_whose_runs_did_not_train_has_no_result() -> None:
    assert hit_words(_held_out(None), reason="seed 0 of peri stuck") == "no result: seed 0 of peri stuck"


def test_forecasts_without_results_are_counted_apart() -> None:
    assert forecast_sentence([_held_out(None)]) == ""
    told = "1 of 1 forecast made before the runs held"
    assert forecast_sentence([_held_out(-0.02)]) == f"{told}."
    assert forecast_sentence([_held_out(-0.02), _held_out(None)]) == f"{told}; 1 more has no result that counts."
    three = [_held_out(-0.02), _held_out(None), _held_out(None)]
    assert forecast_sentence(three) == f"{told}; 2 more have no result that counts."


def test_forecasts_hold_together_one_by_one() -> None:
    """Two of peri at 97.5 %, and two of geonorm that came later, at 98.75 %: no level is that of all four."""
    report = full()
    entries = {
        name: [replace(_held_out(None), scheme=name, forecast=Interval(-0.04, 0.01, -0.015, level))] * 2
        for name, level in (("peri", 0.975), ("geonorm", 0.9875))
    }
    schemes = [replace(own, held_out=entries[own.scheme]) for own in report.answer.schemes if own.scheme in entries]
    facts = ForecastFacts(written="2026-01-02", hash="a", schemes=("peri", "pre"))
    later = replace(facts, hash="b", schemes=("geonorm",))
    design = replace(report.design, forecast=facts, further_forecasts=(later,))
    said = forecast_notes(LadderReport(report.rows, replace(report.answer, schemes=schemes), design))
    assert said[2:] == [
        "Each interval of peri has 97.5 %, so that both hold together with 95 %.",
        "Each interval of geonorm has 98.8 %, so that both hold together with 95 %.",
    ]
    alone = replace(design, further_forecasts=())
    peri = replace(report.answer, schemes=[own for own in schemes if own.scheme == "peri"])
    assert forecast_notes(LadderReport(report.rows, peri, alone))[1:] == [
        "Each interval has 97.5 %, so that both hold together with 95 %."
    ]


def test_reasons_have_a_minus_and_no_scheme_with_a_capital() -> None:
    edge = EdgeRate(scheme="peri", size="4x256", lr=0.016)
    assert hit_words(_held_out(None), reason="a gap of -0.50") == "no result: a gap of −0.50"
    kept = [row for row in synthetic.rows(lost=False) if row.scheme in ("pre", "peri")]
    (own,) = answer(kept, baseline="pre", edge_rates=[edge]).schemes
    assert reasons(own)[-1] == "The rate 0.016 that peri picked at 4x256 is at the edge of those tried."


def test_cautions_come_from_statistics_rates_runs_and_text() -> None:
    report = full()
    cells = tuple(replace(cell, epochs=4 * (cell.epochs or 0)) for cell in report.design.cells)
    told = cautions(LadderReport(report.rows, report.answer, replace(report.design, cells=cells, cautions=("Mine.",))))
    assert told[0] == "3 of 12 cells have fewer than 3,000 steps."
    assert told[1].startswith("The picked rate of geonorm at 4x256, 29.5M tokens and geonorm at 4x256, 118M tokens is")
    assert "the largest tried (2e-3)" in told[1]
    assert told[2] == "One run did not train: it is listed below and part of no gap and no fit."
    assert told[3].startswith("8 of 12 cells saw the text more than once (up to 4 times)")
    assert "hypothesis" in told[4]
    assert told[5] == "Mine."


def test_rates_that_fall_with_size_are_a_hypothesis() -> None:
    rows = synthetic.rows(lost=False)
    design = LadderDesign(rules=(RateRule(scheme="peri", carry="none"),))
    report = LadderReport(rows, answers.answer(rows), design)
    assert any("peri were carried to other sizes by a rule that is a hypothesis" in line for line in cautions(report))


def test_rates_that_are_derived_over_width_alone_are_a_hypothesis_over_depth() -> None:
    rows = synthetic.rows(lost=False)
    over_depth = "derived over width; depth 4 to 12 without a rule: a hypothesis"
    bases = {"pre": over_depth, "peri": over_depth, "geonorm": "fitted", "spannorm": "derived"}
    design = LadderDesign(rules=tuple(RateRule(scheme=name, carry="width", basis=own) for name, own in bases.items()))
    told = cautions(LadderReport(rows, answers.answer(rows), design))
    assert f"The rates of pre and peri were carried to other sizes: {over_depth}." in told
    assert "The rates of geonorm were carried to other sizes by a power that was fitted at one middle size." in told
    assert not any("spannorm" in line and "carried" in line for line in told)


def test_e_is_named_after_what_the_ladder_varies() -> None:
    rows = synthetic.rows(schemes=("pre", "peri"), lost=False)
    one_size = [row for row in rows if row.size == synthetic.TOP]
    law = answer(one_size, baseline="pre").baseline_law
    assert law is not None
    found = answers.answer(rows)
    said = [
        irreducible_sentence(LadderReport(rows, replace(found, baseline_law=own)))
        for own in (
            found.baseline_law,
            replace(law, irreducible=Interval(3.0, 3.5, 3.2, 0.95)),
            replace(law, irreducible=None),
        )
    ]
    assert said[0] == "E, the loss that no compute removes, lies anywhere from 1.80 to 2.40 nats."
    assert said[1] == "E, the loss that no more tokens remove at this size, lies anywhere from 3.00 to 3.50 nats."
    assert "is not identified" in said[2]


def test_a_ladder_that_is_not_finished_says_so_first() -> None:
    report = full()
    told = cautions(replace(report, design=replace(report.design, runs_left=7)))
    assert told[0].startswith("The ladder is not finished: at least 7 runs left.")


def _held_out(measured: float | None) -> HeldOut:
    place = Place(name="12x768, 118M tokens", size="12x768", parameters=110, tokens=118, flops=1.0)
    inside = None if measured is None else -0.04 <= measured <= 0.01
    return HeldOut(
        scheme="peri", place=place, seeds=2, forecast=Interval(-0.04, 0.01, -0.015, 0.95), simple_law=None,
        measured=measured, is_hit=inside, is_simple_law_hit=None,
    )  # fmt: skip


def test_runs_without_a_partner_are_named() -> None:
    """A seed that one side lacks is part of no gap: said, unless it may still come."""
    report = full()
    assert not any("without a partner" in line for line in cautions(report))
    gone = next(row for row in report.rows if row.scheme == "peri" and row.size == "6x384" and row.seed == 1)
    short = replace(report, rows=[row for row in report.rows if row is not gone])
    told = [line for line in cautions(short) if "without a partner" in line]
    assert told == [
        "peri against pre: one run without a partner of the same seed, part of no gap "
        f"(pre at 6x384, {format_count(gone.tokens)} tokens, seed 1)."
    ]
    waiting = replace(short, design=replace(short.design, runs_left=3))
    assert not any("without a partner" in line for line in cautions(waiting))
