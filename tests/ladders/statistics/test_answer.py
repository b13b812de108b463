"""answer() from rows: known laws, order of rows, JSON, and rows that cannot be used."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from normlab.errors import NormLabError
from normlab.ladders.statistics import LadderAnswer, Place, answer, forecast
from normlab.ladders.statistics.simulated.calibration import as_places
from normlab.ladders.statistics.simulated.ladders import (
    EARLY,
    USUAL,
    SimulatedLadder,
    simulated_grid,
    simulated_path,
)
from tests.ladders.statistics.known_rows import BY_NAME, TARGET, exact_rows, noisy_rows, only


@pytest.mark.parametrize("ladder", [simulated_path(), simulated_grid()], ids=["path", "grid"])
def test_a_constant_multiplier_is_found_from_exact_losses(ladder: SimulatedLadder) -> None:
    own = only(answer(exact_rows(ladder, "constant multiplier 1.1"), baseline="pre"))
    for cell in own.cells:
        assert cell.multiplier is not None
        # exp(-gap/s) is exact for small ln k; its second-order term is α·(ln k)²/2 < 0.002. The fit smooths a little.
        assert cell.multiplier.mean == pytest.approx(1.1, abs=0.01)
    assert own.trend.verdict == "shrinks"
    drift = own.trend.compute and own.trend.compute.log_multiplier_change
    assert drift is not None
    assert drift.spans_zero
    beyond = own.projections[1]
    assert beyond.constant_multiplier is not None
    truth = float(BY_NAME["constant multiplier 1.1"].gap(ladder.beyond["10x"])[0])
    assert beyond.constant_multiplier.mean == pytest.approx(truth, abs=0.003)


def test_the_baseline_law_finds_slopes_and_a_range_of_e() -> None:
    law = answer(exact_rows(simulated_path(), "none"), baseline="pre").baseline_law
    assert law is not None
    assert law.irreducible is not None
    # One power is fitted to a law with two, so that E is slightly off.
    assert law.irreducible.mean == pytest.approx(2.1, abs=0.03)
    assert law.residual_sd < 0.002
    for cell in law.cells:
        slope = 0.15 * 0.9 * (cell.parameters / 110e6) ** -0.30 + 0.175 * 1.18 * (cell.tokens / 33e6) ** -0.35
        assert cell.slope.mean == pytest.approx(slope, rel=0.01)


def test_e_lies_between_zero_and_the_smallest_loss() -> None:
    """Three cells leave E open on both sides: what cannot be is not part of its range."""
    rows = noisy_rows(simulated_path(3), "none", seeds=1)
    law = answer(rows, baseline="pre").baseline_law
    assert law is not None
    assert law.irreducible is not None
    smallest = min(cell.loss for cell in law.cells)
    assert 0.0 < law.irreducible.low < law.irreducible.mean < law.irreducible.high < smallest
    # 95 % of what is left between zero and the smallest loss cannot be all of it.
    assert law.irreducible.width < 0.975 * smallest


def test_e_is_not_identified_where_the_law_leaves_no_room() -> None:
    """Losses that fall ever faster put all of E below zero."""
    rows = exact_rows(simulated_path(), "none")
    lowest = min(row.flops for row in rows)
    fallen = [replace(row, loss=4.0 - 0.05 * np.log(row.flops / lowest) ** 2) for row in rows]
    found = answer(fallen, baseline="pre")
    assert found.baseline_law is not None
    assert found.baseline_law.irreducible is None
    assert LadderAnswer.from_json(found.to_json()) == found


def test_the_order_of_rows_does_not_matter() -> None:
    rows = noisy_rows(simulated_path(), "shrinks") + [
        row for row in noisy_rows(simulated_path(), "late onset", 1, scheme="keel") if row.scheme == "keel"
    ]
    first = answer(rows, baseline="pre")
    random.Random(0).shuffle(rows)
    second = answer(rows, baseline="pre")
    by_scheme = [sorted(own.schemes, key=lambda scheme: scheme.scheme) for own in (first, second)]
    assert by_scheme[0] == by_scheme[1]
    assert first.baseline_law == second.baseline_law


def test_json_round_trip() -> None:
    rows = noisy_rows(simulated_path(), "shrinks")
    places = [only(answer(rows, baseline="pre")).projections[0].place]
    held_out = forecast(rows, baseline="pre", cells=places, seeds=2)
    found = answer(rows, baseline="pre", targets=[TARGET], held_out=held_out)
    assert LadderAnswer.from_json(found.to_json()) == found
    assert found.to_dict()["schemes"][0]["projections"][-1]["place"]["name"] == TARGET.name


def test_answers_stored_before_reasons_had_names_are_read() -> None:
    found = answer(noisy_rows(simulated_path(3), "shrinks"), baseline="pre")
    stored = found.to_dict()
    reasons = stored["schemes"][0]["identified"]["reasons"]
    letters = {"wide interval": "a", "forms disagree": "b", "small ladder": "d"}
    for reason in reasons:
        reason["rule"] = letters[reason["rule"]]
    assert "d" in [reason["rule"] for reason in reasons]
    assert LadderAnswer.from_dict(stored) == found


def test_schemes_share_the_level() -> None:
    rows = noisy_rows(simulated_path(), "none")
    more = [replace(row, scheme="keel") for row in rows if row.scheme == "peri"]
    alone, both = answer(rows, baseline="pre"), answer([*rows, *more], baseline="pre")
    assert (alone.level_each, both.level_each) == (0.95, pytest.approx(0.975))
    narrow, wide = (found.schemes[0].cells[0].gap for found in (alone, both))
    assert narrow is not None
    assert wide is not None
    assert wide.width > narrow.width


def test_a_bad_run_takes_its_cell_out_by_name() -> None:
    rows = noisy_rows(simulated_path(), "shrinks")
    spoilt = [
        replace(row, state="diverged", loss=None) if (row.scheme, row.size, row.seed) == ("peri", "110M", 1) else row
        for row in rows
    ]
    found = answer(spoilt, baseline="pre")
    top = only(found).cells[-1]
    assert not top.is_usable
    assert top.reason == "unreliable: seed 1 of peri diverged"
    assert any("seed 1 of peri diverged" in text for text in found.cautions)
    without = answer([row for row in rows if row.size != "110M"], baseline="pre")
    assert only(found).projections[0].simple_law == only(without).projections[0].simple_law


@pytest.mark.parametrize("cells", [1, 5])
def test_a_gap_outside_the_priors_leaves_each_cell_to_its_own_seeds(cells: int) -> None:
    """None is dropped by its outcome: with one cell so far off, or all, each is judged and none fitted."""
    far = simulated_path().sizes[:cells]
    rows = [
        replace(row, loss=(row.loss or 0.0) - 0.5 * (row.scheme == "peri" and row.size in far))
        for row in noisy_rows(simulated_path(), "none")
    ]
    own = only(answer(rows, baseline="pre"))
    for cell in own.cells:
        values = np.array(list(cell.differences.values()))
        # Student's t for two degrees of freedom: 4.303.
        half = 4.302653 * values.std(ddof=1) / np.sqrt(3)
        assert cell.is_usable
        assert (cell.gap, cell.multiplier) == (None, None)
        assert cell.student is not None
        assert (cell.student.low, cell.student.high) == pytest.approx(
            (values.mean() - half, values.mean() + half), rel=1e-5
        )
    assert own.trend.compute is None
    assert own.projections == []
    assert [reason.rule for reason in own.identified.reasons] == ["gap too large"]
    assert f"better at {cells} of 5 cells, each by its own seeds alone" in own.sentence
    assert "too large for the assumptions of a trend or a forecast" in own.sentence
    places = as_places(simulated_path().beyond["3.5x"])
    assert forecast(rows, baseline="pre", cells=places, seeds=2) == []


def test_a_result_far_outside_its_forecast_is_a_miss() -> None:
    """A gap of 0.5 nats was called unreliable, and the forecast not judged."""
    rows = noisy_rows(simulated_path(), "shrinks")
    top = next(row for row in rows if row.size == "110M")
    place = Place(name="110M", size=top.size, parameters=top.parameters, tokens=top.tokens, flops=top.flops)
    stored = forecast([row for row in rows if row.size != "110M"], baseline="pre", cells=[place], seeds=3)
    off = [replace(row, loss=(row.loss or 0.0) + 0.5 * (row.scheme == "peri" and row.size == "110M")) for row in rows]
    (entry,) = only(answer(off, baseline="pre", held_out=stored)).held_out
    assert entry.is_hit is False


def test_one_run_listed_as_several_seeds_is_a_caution() -> None:
    """At three of five cells all seeds have the losses of the first one; at two, they may by chance of rounding."""
    rows = noisy_rows(simulated_path(), "shrinks")
    first = {(row.scheme, row.cell): row.loss for row in rows if row.seed == 0}
    sizes = list(dict.fromkeys(row.size for row in rows))

    def told(repeated: int) -> list[str]:
        same = [replace(row, loss=first[row.scheme, row.cell]) if row.size in sizes[:repeated] else row for row in rows]
        return [line for line in answer(same, baseline="pre").cautions if "same gap" in line]

    assert told(0) == told(2) == []
    assert told(3) == [
        "All seeds of peri have the same gap at 3 of 5 cells: if one run is listed as several seeds, the intervals are "
        "too narrow."
    ]


def test_seeds_without_a_partner_are_not_pairs() -> None:
    rows = [row for row in noisy_rows(simulated_path(), "none") if not (row.scheme == "pre" and row.seed == 2)]
    own = only(answer(rows, baseline="pre"))
    assert [cell.n for cell in own.cells] == [2] * 5
    rows = [row for row in rows if (row.scheme == "pre") == (row.seed == 0)]
    assert {cell.reason for cell in only(answer(rows, baseline="pre")).cells} == {
        "no seed in both the scheme and the baseline"
    }


def test_one_seed_is_answered_with_assumed_noise() -> None:
    found = answer(noisy_rows(simulated_path(), "shrinks", seeds=1), baseline="pre")
    cell = only(found).cells[-1]
    assert cell.student is None
    assert cell.gap is not None
    assert any("one seed at every cell" in text for text in found.cautions)


def test_a_scheme_on_the_smaller_sizes_has_its_own_top() -> None:
    rows = [row for row in noisy_rows(simulated_path(), "shrinks") if row.scheme == "pre" or row.size != "110M"]
    own = only(answer(rows, baseline="pre"))
    assert own.top is not None
    assert own.top.size == "58.8M"
    assert own.projections[0].times_top == pytest.approx(3.5)


def test_a_forecast_is_hit_or_missed() -> None:
    rows = noisy_rows(simulated_path(), "shrinks")
    below = [row for row in rows if row.size != "110M"]
    top = next(row for row in rows if row.size == "110M")
    place = Place(name="110M", size=top.size, parameters=top.parameters, tokens=top.tokens, flops=top.flops)
    stored = forecast(below, baseline="pre", cells=[place], seeds=3)
    hit = only(answer(rows, baseline="pre", held_out=stored))
    assert hit.held_out[0].is_hit
    off = [
        replace(row, loss=(row.loss or 0.0) + 0.15) if row.scheme == "peri" and row.size == "110M" else row
        for row in rows
    ]
    missed = only(answer(off, baseline="pre", held_out=stored))
    assert missed.held_out[0].is_hit is False
    assert "missed forecast" in [reason.rule for reason in missed.identified.reasons]
    pending = only(answer(below, baseline="pre", held_out=stored))
    assert pending.held_out[0].measured is None
    assert pending.held_out[0].is_hit is None


def test_few_steps_are_marked_and_refitted_without() -> None:
    rows = [
        replace(row, steps=1000 if row.parameters < 2e7 else 7200) for row in noisy_rows(simulated_path(), "shrinks")
    ]
    found = answer(rows, baseline="pre")
    assert [cell.few_steps for cell in only(found).cells] == [True, True, False, False, False]
    assert any("2 of 5 cells have fewer than 3,000 steps; without them" in text for text in found.cautions)


def test_speed_counts_from_100m_parameters_on() -> None:
    speed = {"pre": 100.0, "peri": 98.0}
    rows = [replace(row, tokens_per_s=speed[row.scheme]) for row in noisy_rows(simulated_path(), "shrinks")]
    cells = only(answer(rows, baseline="pre")).cells
    assert all(cell.multiplier_in_time is None for cell in cells[:-1])
    assert cells[-1].multiplier is not None
    assert cells[-1].multiplier_in_time is not None
    assert cells[-1].multiplier_in_time.high == pytest.approx(0.98 * cells[-1].multiplier.high)


def test_a_scheme_pays_for_its_own_flops() -> None:
    """A multiplier of 1.1 at three times the FLOPs a token is one of 1.1/3; the one in time has its own ratio."""
    speed = {"pre": 100.0, "peri": 98.0}
    rows = [
        replace(row, tokens_per_s=speed[row.scheme]) for row in noisy_rows(simulated_path(), "constant multiplier 1.1")
    ]
    cost = {"110M": 3.0}
    dear = [replace(row, flops=row.flops * cost.get(row.size, 2.0)) if row.scheme == "peri" else row for row in rows]
    found = answer(dear, baseline="pre")
    assert any("peri takes 2 to 3 times the baseline's FLOPs for the same tokens" in line for line in found.cautions)
    equal, own = only(answer(rows, baseline="pre")), only(found)
    for before, after in zip(equal.cells, own.cells, strict=True):
        assert before.multiplier is not None
        assert after.multiplier is not None
        assert after.multiplier.mean == pytest.approx(before.multiplier.mean / cost.get(after.size, 2.0))
        assert (after.flops, after.gap, after.multiplier_in_time) == (
            before.flops,
            before.gap,
            before.multiplier_in_time,
        )
    assert own.projections[0].multiplier is not None
    assert equal.projections[0].multiplier is not None
    assert own.projections[0].multiplier.mean == pytest.approx(equal.projections[0].multiplier.mean / 3.0)
    before, after = (each.trend.compute and each.trend.compute.log_multiplier_change for each in (equal, own))
    assert before is not None
    assert after is not None
    assert after.mean == pytest.approx(before.mean + np.log(2.0 / 3.0))


def test_wrong_rows_are_refused_in_one_line() -> None:
    rows = noisy_rows(simulated_path(), "none")
    with pytest.raises(NormLabError, match="no rows"):
        answer([], baseline="pre")
    with pytest.raises(NormLabError, match="unknown baseline 'post'"):
        answer(rows, baseline="post")
    with pytest.raises(NormLabError, match="listed twice"):
        answer([*rows, rows[0]], baseline="pre")
    with pytest.raises(NormLabError, match="between 0 and 1"):
        answer(rows, baseline="pre", level=95.0)


def test_only_a_baseline_is_an_answer_without_schemes() -> None:
    found = answer([row for row in noisy_rows(simulated_path(), "none") if row.scheme == "pre"], baseline="pre")
    assert found.schemes == []
    assert found.baseline_law is not None


def test_probability_that_the_gap_is_smaller_agrees_with_samples() -> None:
    """P(|there| < |top|) by the smooth estimator, for one seeded ladder, against draws from the joint posterior."""
    from normlab.ladders.statistics.cells import cells_of
    from normlab.ladders.statistics.estimators.fit import estimate, sample_of

    rows = noisy_rows(simulated_path(), "shrinks")
    own = only(answer(rows, baseline="pre"))
    sample = sample_of(cells_of(rows, "peri", "pre"))
    pair = [own.projections[0].place, sample.places[-1]]
    there, top, both = estimate(sample, pair, np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    rng, n = np.random.default_rng(0), 200_000
    at = rng.choice(len(there.weights), size=n, p=there.weights / there.weights.sum())
    shared = (both.sds**2 - there.sds**2 - top.sds**2) / 2.0
    at_top = rng.normal(top.means[at], top.sds[at])
    middle = there.means[at] + shared[at] / top.sds[at] ** 2 * (at_top - top.means[at])
    spread = np.sqrt(np.maximum(there.sds[at] ** 2 - shared[at] ** 2 / top.sds[at] ** 2, 0.0))
    drawn = np.mean(np.abs(rng.normal(middle, spread)) < np.abs(at_top))
    assert own.projections[0].shrinks == pytest.approx(drawn, abs=5.0 * 0.5 / np.sqrt(n) + 2e-3)


def test_scatter_that_depends_on_the_budget_is_a_caution() -> None:
    uneven, even = (noisy_rows(simulated_grid(), "shrinks", noise=own) for own in (EARLY, USUAL))
    found = answer(uneven, baseline="pre")
    (text,) = (line for line in found.cautions if "vary over seeds" in line)
    by_tokens = {cell.tokens: cell.seed_sd for cell in only(found).cells}
    assert text == (
        f"Gaps of peri vary over seeds by {by_tokens[29_500_000]:.2g} nats at 29.5M tokens and by "
        f"{by_tokens[118_000_000]:.2g} at 118M; intervals are wider where they vary more."
    )
    assert not any("vary over seeds" in line for line in answer(even, baseline="pre").cautions)


def test_scatter_that_is_uneven_by_chance_is_no_caution() -> None:
    """Two seeds on a path of five rungs leave the power so open that its mean may be a factor of 2 over the ladder."""
    found = answer(noisy_rows(simulated_path(), "none", seed=10, seeds=2), baseline="pre")
    sds = [cell.seed_sd for cell in only(found).cells if cell.seed_sd is not None]
    assert max(sds) > 2.0 * min(sds)
    assert not any("vary over seeds" in line for line in found.cautions)
