"""Learning rates of a ladder: searched at the smallest size, carried to the others by a rule, tested at a middle size.

For each scheme:

1. At the smallest size, at each of the search budgets (usually the smallest and the largest), with the schedule of the
   ladder's own runs: a search that widens until the best rate lies between two others (`compare/bracket.py`), from
   the usual rate or from a list. The second search without a list starts from the result of the first.
2. All budgets of a size come from one run at a constant rate, so one rate serves them all: of the rates tried at every
   search budget, the one whose losses lie least above the best of their budget, added up. Losses are those of a
   parabola through the rates near the best (`rate_curve.py`): one seed scatters.
3. The rule carries that rate over the sizes: muP or CompleteP put their factors into the optimiser, so the rate stays;
   without a rule rates fall with size^-0.2.
4. At a middle size the carried rate starts a search at the smallest budget. Rates whose losses one seed does not tell
   apart all count as best, at both sizes. If best rates of the two are within a factor of √2, the rule is confirmed. If
   not, rates follow the smallest power of width that brings them together, from -1 to 1: the largest size is far beyond
   the middle one, so that a factor of 2 by chance would be one of 6 there. Where the middle size is only deeper than
   the smallest, it is a power of depth. A rate outside of all that were tried for its scheme is named on the page.
5. Near a rate that does not train one seed may train by luck. Where the next larger rate tried did not, two more seeds
   must train at the chosen one, at the smallest budget; otherwise the best of the other rates is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from normlab.compare.bracket import Bracket, End, RateList, RateSearch, start_rate
from normlab.compare.store import Row
from normlab.compare.tuning import RateResults, group_by_rate, pick_rate
from normlab.ladders.config import TUNE_SEED, LadderConfig
from normlab.ladders.rate_curve import smooth_losses
from normlab.ladders.run import LadderRun
from normlab.ladders.rung import Rung
from normlab.ladders.size import Size

MakeRun = Callable[[Rung, str, int, float, int], LadderRun]
"""Makes a tune run from rung, scheme, budget, rate and seed."""

_CONFIRMED = 1.05 * math.sqrt(2.0)
"""Largest factor between the carried rate and the best one that confirms the rule: one step of the grid, rounded."""

_CONFIRMING = (TUNE_SEED + 1, TUNE_SEED + 2)
"""Seeds that must train, too, at a rate whose next larger one did not."""

_LARGEST_POWER = 1.0
"""Largest exponent over width, either way, that one middle size may add to a rule."""

_TIED = 0.01
"""Nats within which one seed does not tell the losses of two rates apart."""


@dataclass(frozen=True)
class Search:
    """Rates tried for one scheme at one size and budget."""

    rung: Rung
    budget: int
    tried: Mapping[float, RateResults] = field(default_factory=dict)
    """Results by rate, ascending."""
    due: tuple[float, ...] = ()
    """Rates to try next; empty once the search has ended."""
    pick: float | None = None
    """The best rate, once the search has ended; None if no run trained."""
    end: End | None = None
    """Position of the best rate, once the search has ended: interior, at an end of what was tried, or untrained."""
    confirmed: Mapping[float, RateResults] = field(default_factory=dict)
    """Results of further seeds, by rate."""
    confirming: tuple[float, int] | None = None
    """Rate and seed of a confirming run that is due."""

    @property
    def has_ended(self) -> bool:
        return not self.due and self.confirming is None

    @property
    def runs(self) -> list[tuple[float, int]]:
        """Rate and seed of all its runs, those that have ended and those that are due."""
        confirmed = [(lr, seed) for lr, own in self.confirmed.items() for seed in own.values]
        due = [] if self.confirming is None else [self.confirming]
        return [(lr, TUNE_SEED) for lr in (*self.tried, *self.due)] + confirmed + due

    def is_near_loss(self, lr: float) -> bool:
        """Whether the next larger rate that was tried did not train, with any of its seeds."""
        larger = min((rate for rate in self.tried if rate > lr), default=None)
        return larger is not None and (not self.tried[larger].trained or self.has_failed(larger))

    def has_failed(self, lr: float) -> bool:
        """Whether a further seed did not train at this rate."""
        return lr in self.confirmed and self.confirmed[lr].lost > 0


@dataclass(frozen=True)
class FoundRate:
    """The learning rate of a scheme, and how it was found."""

    scheme: str
    lr: float | None
    """Rate at the smallest size; None if no run trained at any rate."""
    searches: tuple[Search, ...] = ()
    """The searches at the smallest size, then the test at the middle size."""
    verdict: Literal["confirmed", "corrected", "untested"] = "untested"
    """Result of the test at the middle size."""
    power: float = 0.0
    """Exponent over `Rates.side` that the middle size showed beyond the rule; 0 unless the rule was corrected."""


class Rates:
    """The learning-rate searches of a ladder, as a function of the rows so far."""

    def __init__(self, config: LadderConfig, make_run: MakeRun):
        self._config, self._make_run = config, make_run
        self._metric = config.base.task_object.metric
        self._smallest = config.rungs[0]

    def runs(self, rows: Sequence[Row]) -> list[LadderRun]:
        """All tune runs known from these rows, including those that have ended; small ones first."""
        searches = [(name, one) for name, own in self.searches(rows).items() for one in own]
        searches.sort(key=lambda pair: (pair[1].rung.size, pair[1].budget))
        return [self._run(one, name, *run) for name, one in searches for run in one.runs]

    def found(self, rows: Sequence[Row]) -> dict[str, FoundRate]:
        """The rates of the schemes whose searches have all ended."""
        if not self._config.is_tuned:
            return {name: FoundRate(name, float(self._config.lrs[0])) for name in self._config.names}
        ended = {name: own for name, own in self.searches(rows).items() if all(one.has_ended for one in own)}
        return {name: self._found(name, own) for name, own in ended.items()}

    def searches(self, rows: Sequence[Row]) -> dict[str, list[Search]]:
        """What was tried so far for each scheme: its searches in their order, up to the first that has not ended."""
        if not self._config.is_tuned:
            return {}
        known = {row["run"]: row for row in rows if row["role"] != "judge"}
        return {name: self._searches(name, known) for name in self._config.names}

    def rate_at(self, found: FoundRate, size: Size) -> float | None:
        """The rate of a scheme at a size."""
        if found.lr is None:
            return None
        return found.lr * self._rule(size) * self._growth(size) ** found.power

    def sizes_outside(self, found: FoundRate) -> dict[Size, float]:
        """Sizes at which the rate of a scheme lies outside of all rates that were tried for it, with that rate."""
        tried = [lr for search in found.searches for lr in search.tried]
        own = {rung.size: self.rate_at(found, rung.size) for rung in self._config.rungs
               if found.scheme in self._config.names_at(rung)}  # fmt: skip
        return {
            size: lr for size, lr in own.items()
            if tried and lr is not None and not 0.99 * min(tried) < lr < 1.01 * max(tried)
        }  # fmt: skip

    @property
    def middle(self) -> Rung | None:
        """The rung at which the rule is tested: the middle one of those that are not held out, above the smallest."""
        fitted = [rung for rung in self._config.rungs if not rung.is_held_out]
        return fitted[len(fitted) // 2] if len(fitted) > 1 else None

    @property
    def side(self) -> Literal["width", "depth"]:
        """What a power is fitted over: depth where the middle size differs from the smallest in nothing else."""
        return "depth" if self.middle is not None and self.middle.size.width == self._smallest.size.width else "width"

    def _growth(self, size: Size) -> float:
        """How many times wider, or deeper, a size is than the smallest one."""
        first = self._smallest.size
        return size.depth / first.depth if self.side == "depth" else size.width / first.width

    # -- one scheme ----------------------------------------------------------------------------------------------------

    def _searches(self, scheme: str, known: Mapping[str, Row]) -> list[Search]:
        pick: float | None = None
        searches: list[Search] = []
        for budget in self._config.search_budgets:
            searches.append(self._search(self._smallest, scheme, budget, pick, known))
            if searches[-1].due:
                return searches
            pick = searches[-1].pick or pick
        lr = self._rate_for_all_budgets(searches)
        searches[0] = _confirming(searches[0], lr, searches)
        if self.middle is not None and lr is not None and searches[0].has_ended:
            carried = lr * self._rule(self.middle.size)
            test = self._search(self.middle, scheme, self.middle.budgets[0], carried, known)
            searches.append(test if test.due else _confirming(test, test.pick, [test]))
        return searches

    def _search(self, rung: Rung, scheme: str, budget: int, also: float | None, known: Mapping[str, Row]) -> Search:
        """The search at a size and a budget, which tries `also`, a rate that was found before it."""
        tried = self._tried(rung, scheme, budget, known)
        state, confirmed = self._state(tried, also), self._confirmed(rung, scheme, budget, known)
        search = Search(rung, budget, tried, state.next_rates, None, state.end, confirmed)
        sure = {lr: own for lr, own in tried.items() if not search.has_failed(lr)}
        return search if search.due else replace(search, pick=pick_rate(sure or tried, self._metric))

    def _state(self, tried: Mapping[float, RateResults], also: float | None) -> RateSearch:
        """What to try next, or how the search has ended."""
        scores = {lr: own.score(self._metric) for lr, own in tried.items()}
        if self._config.lrs != "auto":
            return RateList(self._config.lrs, also=also).next(scores)
        start = also or self._config.usual_rate(self._smallest.size)
        return Bracket(start, self._config.refine_rates).next(scores)

    def _tried(self, rung: Rung, scheme: str, budget: int, known: Mapping[str, Row]) -> dict[float, RateResults]:
        """Results of the tune runs that have ended, by rate, in ascending order."""
        return group_by_rate(self._rows(rung, scheme, budget, known, (TUNE_SEED,)), "tune")

    def _confirmed(self, rung: Rung, scheme: str, budget: int, known: Mapping[str, Row]) -> dict[float, RateResults]:
        """Results of further seeds, by rate."""
        return group_by_rate(self._rows(rung, scheme, budget, known, _CONFIRMING), "confirm")

    def _rows(self, rung: Rung, scheme: str, budget: int, known: Mapping[str, Row], seeds: Sequence[int]) -> list[Row]:
        """The rows of a scheme at a size and a budget with these seeds, in ascending order of their rates."""
        rates = {row["base_lr"] for row in known.values() if row["scheme"] == scheme and row["size"] == str(rung.size)}
        runs = [(lr, self._make_run(rung, scheme, budget, lr, seed).name) for lr in sorted(rates) for seed in seeds]
        return [{**known[name], "lr": lr} for lr, name in runs if name in known]

    def _rate_for_all_budgets(self, searches: Sequence[Search]) -> float | None:
        """The rate for all budgets: of those tried at each, the one whose losses lie least above the best ones."""
        losses = [self._losses(one) for one in searches]
        common = set.intersection(*(set(own) for own in losses))
        if common:
            return min(sorted(common), key=lambda lr: sum(own[lr] - min(own.values()) for own in losses))
        picks = [one.pick for one in searches if one.pick is not None]
        return math.prod(picks) ** (1 / len(picks)) if picks else None

    def _found(self, scheme: str, searches: Sequence[Search]) -> FoundRate:
        budgets = len(self._config.search_budgets)
        lr, tests = self._rate_for_all_budgets(searches[:budgets]), searches[budgets:]
        if lr is None or not tests or tests[0].pick is None:
            return FoundRate(scheme, lr, tuple(searches))
        ratio = self._factor(lr, searches[0], tests[0])
        if max(ratio, 1.0 / ratio) <= _CONFIRMED:
            return FoundRate(scheme, lr, tuple(searches), "confirmed")
        power = math.log(ratio) / math.log(self._growth(tests[0].rung.size))
        power = min(max(power, -_LARGEST_POWER), _LARGEST_POWER)
        return FoundRate(scheme, lr, tuple(searches), "corrected", power)

    def _factor(self, lr: float, small: Search, test: Search) -> float:
        """Factor from a carried rate to a best one of the test: the smallest there is.

        The rate serves all budgets and the test has one: what was best with the smallest budget counts as carried, too.
        """
        carried = {own * self._rule(test.rung.size) for own in (lr, *self._best(small))}
        return min((best / own for own in carried for best in self._best(test)), key=lambda one: abs(math.log(one)))

    def _best(self, search: Search) -> list[float]:
        """The pick of a search, and the rates that are as good."""
        losses = self._losses(search)
        if not losses:
            return [] if search.pick is None else [search.pick]
        return [lr for lr, loss in losses.items() if loss <= min(losses.values()) + _TIED]

    def _losses(self, search: Search) -> dict[float, float]:
        """Losses of the rates that trained, with all seeds that were tried, smoothed over the rates."""
        trained = {lr: own.trained[0] for lr, own in search.tried.items() if own.trained and not search.has_failed(lr)}
        return smooth_losses({lr: self._metric.sign * value for lr, value in trained.items()})

    def _rule(self, size: Size) -> float:
        """Factor on the rate of the smallest size; under muP and CompleteP the optimiser has it in its groups."""
        first = self._smallest.size
        if self._config.carry != "none":
            return 1.0
        return start_rate(size.depth, size.width) / start_rate(first.depth, first.width)

    def _run(self, search: Search, scheme: str, lr: float, seed: int) -> LadderRun:
        return self._make_run(search.rung, scheme, search.budget, lr, seed)


def _confirming(search: Search, lr: float | None, near: Sequence[Search]) -> Search:
    """Add the next confirming run at a rate, if a search in `near` has a lost run at the next rate."""
    if lr is None or search.has_failed(lr) or not any(one.is_near_loss(lr) for one in near):
        return search
    done = search.confirmed[lr].values if lr in search.confirmed else {}
    seed = next((seed for seed in _CONFIRMING if seed not in done), None)
    return search if seed is None else replace(search, confirming=(lr, seed))
