"""The search for a rate, on losses that are known functions of it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest

from normlab.compare.bracket import Bracket, RateList, RateSearch, Score, grid_index, grid_rate, start_rate

Loss = Callable[[float], Score]


def valley(optimum: float, lost_above: float = math.inf) -> Loss:
    """A parabola in the logarithm of the rate; rates above a limit do not train."""

    def loss(lr: float) -> Score:
        return Score(1, math.inf) if lr > lost_above else Score(0, 3.0 + math.log(lr / optimum) ** 2)

    return loss


def walk(bracket: Bracket | RateList, loss: Loss) -> tuple[RateSearch, list[tuple[float, ...]]]:
    """The search to its end, and what it asked for on the way."""
    scores: dict[float, Score] = {}
    asked = []
    while (step := bracket.next(scores)).next_rates:
        assert not set(step.next_rates) & scores.keys(), "a rate was asked for twice"
        asked.append(step.next_rates)
        scores |= {lr: loss(lr) for lr in step.next_rates}
    return step, asked


def test_the_grid_has_two_rates_in_a_factor_of_two() -> None:
    assert [grid_rate(k) for k in (-2, -1, 0, 1, 2, 3, 4)] == [5e-4, 7.07e-4, 1e-3, 1.41e-3, 2e-3, 2.83e-3, 4e-3]
    assert [grid_index(grid_rate(k)) for k in range(-40, 40)] == list(range(-40, 40))
    assert grid_index(1.2e-3) is None


@pytest.mark.parametrize(("depth", "width", "first"), [
    (12, 768, 1e-3), (24, 1024, 1e-3), (24, 2048, 5e-4), (4, 64, 4e-3), (6, 64, 4e-3), (36, 64, 2e-3), (128, 64, 2e-3),
])  # fmt: skip
def test_the_start_follows_from_the_size(depth: int, width: int, first: float) -> None:
    assert Bracket(start_rate(depth, width)).first == (first / 2, first, 2 * first)


def test_a_best_rate_in_the_middle_takes_two_rounds() -> None:
    end, asked = walk(Bracket(1e-3), valley(1e-3))
    assert asked == [(5e-4, 1e-3, 2e-3), (7.07e-4, 1.41e-3)]
    assert end == RateSearch(pick=1e-3, end="interior")


def test_a_search_that_is_not_refined_ends_with_factors_of_two() -> None:
    end, asked = walk(Bracket(1e-3, refined=False), valley(2.8e-3))
    assert asked == [(5e-4, 1e-3, 2e-3), (4e-3,)]
    assert end == RateSearch(pick=2e-3, end="interior")


@pytest.mark.parametrize("octaves", [-3.4, -2.0, -1.3, -0.6, 0.0, 0.4, 1.0, 1.9, 3.3])
def test_the_pick_is_the_best_rate_of_the_grid_wherever_it_lies(octaves: float) -> None:
    optimum = 1e-3 * 2.0**octaves
    end, asked = walk(Bracket(1e-3), valley(optimum))
    assert end.end == "interior"
    assert end.pick is not None
    # The nearest rate of the grid lies within a factor of 2^(1/4); names of rates have three digits.
    assert abs(math.log2(end.pick / optimum)) <= 0.25 + 0.01
    tried = sorted(lr for round_ in asked for lr in round_)
    place = tried.index(end.pick)
    assert tried[place - 1] / end.pick == pytest.approx(2**-0.5, rel=5e-3)
    assert tried[place + 1] / end.pick == pytest.approx(2**0.5, rel=5e-3)


@pytest.mark.parametrize(("optimum", "pick", "end"), [(1e-6, 1.56e-5, "lowest"), (10.0, 6.4e-2, "highest")])
def test_a_best_rate_beyond_the_limits_is_said_to_be_there(optimum: float, pick: float, end: str) -> None:
    found, asked = walk(Bracket(1e-3), valley(optimum))
    assert (found.pick, found.end) == (pick, end)
    assert pick in Bracket(1e-3).limits
    assert all(1.56e-5 <= lr <= 6.4e-2 for round_ in asked for lr in round_)


def test_a_rate_that_does_not_train_ends_the_walk_upwards() -> None:
    found, asked = walk(Bracket(1e-3), valley(1.0, lost_above=3e-3))
    assert found == RateSearch(pick=2.83e-3, end="interior")
    assert max(lr for round_ in asked for lr in round_) == 4e-3


def test_one_lost_seed_ranks_below_any_loss() -> None:
    def loss(lr: float) -> Score:
        return Score(1, 1.0) if lr >= 1e-3 else Score(0, 5.0 + math.log(lr / 2e-4) ** 2)

    found, _ = walk(Bracket(1e-3), loss)
    assert found.pick == 1.77e-4
    assert found.end == "interior"


def test_where_nothing_trains_both_sides_are_tried_up_to_the_limits() -> None:
    found, asked = walk(Bracket(1e-3), lambda lr: Score(1, math.inf))
    assert found == RateSearch(end="untrained")
    assert asked[1] == (2.5e-4, 4e-3)
    tried = sorted(lr for round_ in asked for lr in round_)
    assert tried == [6.25e-5, 1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]


@pytest.mark.parametrize("lr", [6.25e-5, 1.6e-2])
def test_a_single_rate_that_trains_is_found_where_the_search_of_a_lost_scheme_ends(lr: float) -> None:
    found, asked = walk(Bracket(1e-3), lambda other: Score(0, 4.0) if other == lr else Score(1, math.inf))
    assert found == RateSearch(pick=lr, end="interior")
    # Nine up to a factor of 16 on both sides, the next one beyond, and two around it.
    assert sum(map(len, asked)) == 12


def test_ties_go_to_the_lower_rate_and_the_walk_still_ends() -> None:
    found, _ = walk(Bracket(1e-3), lambda lr: Score(0, 1.0))
    assert found == RateSearch(pick=1.56e-5, end="lowest")


def test_the_order_in_which_runs_end_does_not_matter() -> None:
    loss, bracket = valley(3e-3), Bracket(1e-3)
    scores: dict[float, Score] = {}
    asked = []
    # One run at a time, always the last of those that are due.
    while due := bracket.next(scores).next_rates:
        asked.append(due[-1])
        scores[due[-1]] = loss(due[-1])
    together, rounds = walk(bracket, loss)
    assert bracket.next(scores) == together
    assert set(asked) == {lr for round_ in rounds for lr in round_}


def test_rates_that_are_not_on_the_grid_change_nothing() -> None:
    assert Bracket(1e-3).next({1.2e-3: Score(0, 0.0)}).next_rates == (5e-4, 1e-3, 2e-3)


def test_it_needs_no_torch() -> None:
    code = "import sys, normlab.compare.bracket; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_an_end_as_good_as_the_best_is_widened() -> None:
    """Accuracies are counts, and often equal."""

    def flat(lr: float) -> Score:
        return Score(0, 3.0 if lr in (1e-3, 2e-3) else 4.0)

    assert walk(Bracket(1e-3, refined=False), flat)[1] == [(5e-4, 1e-3, 2e-3), (4e-3,)]
    assert walk(RateList((5e-4, 1e-3, 2e-3)), flat)[1] == [(5e-4, 1e-3, 2e-3), (4e-3,)]


def test_a_list_with_its_best_inside_is_tried_and_nothing_else() -> None:
    end, asked = walk(RateList((4e-3, 1e-3, 2e-3)), valley(2e-3))
    assert asked == [(1e-3, 2e-3, 4e-3)]
    assert end == RateSearch(pick=2e-3, end="interior")


def test_a_list_is_widened_by_its_own_steps_until_the_best_is_inside() -> None:
    end, asked = walk(RateList((1e-3, 3e-3)), valley(9e-3))
    assert asked == [(1e-3, 3e-3), (9e-3,), (2.7e-2,)]
    assert end == RateSearch(pick=9e-3, end="interior")
    end, asked = walk(RateList((1e-3, 2e-3)), valley(3e-4))
    assert asked == [(1e-3, 2e-3), (5e-4,), (2.5e-4,), (1.25e-4,)]
    assert end == RateSearch(pick=2.5e-4, end="interior")


def test_a_list_is_widened_by_at_most_a_factor_of_64() -> None:
    end, asked = walk(RateList((1e-3, 2e-3)), valley(1e3))
    assert asked[-1] == (0.128,)
    assert end == RateSearch(pick=0.128, end="highest")
    end, asked = walk(RateList((1e-3, 2e-3)), valley(1e-9))
    assert end == RateSearch(pick=1.56e-5, end="lowest")


def test_a_rate_that_does_not_train_ends_a_list_from_above() -> None:
    end, asked = walk(RateList((1e-3, 2e-3)), valley(1e-2, lost_above=4e-3))
    assert asked == [(1e-3, 2e-3), (4e-3,), (8e-3,)]
    assert end == RateSearch(pick=4e-3, end="interior")


def test_a_list_of_which_nothing_trains_is_not_widened() -> None:
    end, asked = walk(RateList((1e-3, 2e-3)), valley(1e-3, lost_above=1e-4))
    assert asked == [(1e-3, 2e-3)]
    assert end == RateSearch(end="untrained")


def test_a_rate_found_elsewhere_is_tried_with_the_list_and_does_not_change_its_steps() -> None:
    end, asked = walk(RateList((1e-3, 2e-3), also=2.1e-3), valley(1e-2))
    assert asked == [(1e-3, 2e-3, 2.1e-3), (4.2e-3,), (8.4e-3,), (1.68e-2,)]
    assert end == RateSearch(pick=8.4e-3, end="interior")


@pytest.mark.parametrize("rates", [(1e-3, 1.0000001e-3), (1e-3, 1.01e-3), (1e-5, 1e-3)])
def test_lists_with_strange_steps_end(rates: tuple[float, ...]) -> None:
    """Steps below √2 would take hundreds of runs, or find the rate they come from; one of 100 would find nothing."""
    end, asked = walk(RateList(rates), valley(2e-2))
    assert end.end == "interior"
    assert len(asked) < 12


def test_a_rate_of_the_list_is_not_tried_again_for_its_digits() -> None:
    exact = math.sqrt(2.0) * 1e-3
    assert RateList((exact, 2 * exact), also=1.41e-3).next({}).next_rates == (exact, 2 * exact)
    # Beyond an end a rate of the grid is taken as the grid has it.
    assert walk(RateList((1e-3, 1.41e-3)), valley(3e-3))[1][1:] == [(2e-3,), (2.83e-3,), (4e-3,)]


def test_an_end_as_good_as_the_best_at_the_limit_is_no_bracket() -> None:
    for search in (Bracket(1e-3, refined=False), RateList((5e-4, 1e-3, 2e-3))):
        end, _ = walk(search, lambda lr: Score(0, 3.0 if lr >= 2e-3 else 4.0))
        assert (end.pick, end.end) == (2e-3, "highest")
