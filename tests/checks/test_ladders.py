"""Ladders stay within their time, keep their span and the design's own depth, and say what they left out."""

from __future__ import annotations

import pytest

from normlab.checks import ladders
from normlab.checks.burst import Burst
from normlab.checks.config import CheckConfig
from normlab.checks.judge.growth_laws import classify
from normlab.checks.ladders import Budget, by_importance, default_depths, depth_ladder, step_ladder, width_ladder
from normlab.errors import NormLabError
from normlab.targets import resolve
from tests.checks.synthetic import profile

BOTH, NEITHER = frozenset({"depth", "width"}), frozenset()
QUICK = {"steps": 2, "length": 8, "batch_size": 2}


class Design:
    """As much of a target as a ladder asks about."""

    name, kind, blocks = "a design", "factory", None

    def __init__(self, depth: int = 48, width: int | None = 64, resizable: frozenset[str] = BOTH):
        self.depth, self.width, self.resizable = depth, width, resizable

    def with_step(self, size):
        return None

    def check_room(self, *, depth=None, width=None):
        pass

    def build(self, *, depth=None, width=None, seed=0):
        import torch

        return torch.nn.Linear(1, 1)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def bursts(monkeypatch):
    """Bursts that take a second a block, and what was asked for."""
    clock, asked = Clock(), []
    monkeypatch.setattr(ladders.time, "perf_counter", clock)

    def burst(target, *, depth=None, width=None, seed=0, steps=30, lr="auto", inspect=None):
        size = depth or target.depth
        asked.append((size, width, seed))
        seconds = size * (width or 64) / 64
        clock.now += seconds
        looks = [{"stack": profile(size, seed=seed, step=step)} for step in (0, steps)]
        for look in looks if inspect else []:
            inspect(None, look["stack"])
        return Burst(before=looks[0], after=looks[1], losses=[1.0], lr=1e-3, seconds=seconds, parameters=1)

    monkeypatch.setattr(ladders, "burst", burst)
    return asked


def say_nothing(_words: str) -> None:
    pass


def run(target, inspected=None, own_depth=None, **options):
    seen = [] if inspected is None else inspected
    return depth_ladder(
        target,
        CheckConfig(**options),
        say_nothing,
        own_depth=own_depth or target.depth,
        inspect=lambda model, look: seen.append((look.depth, look.step)),
    )


@pytest.mark.parametrize(
    ("own", "depths"),
    [
        (48, (6, 12, 24, 48)),
        (96, (12, 24, 48, 96)),
        (80, (10, 20, 40, 80)),
        (32, (8, 16, 32)),
        (26, (6, 13, 26)),
        (16, (8, 16, 32)),
        (12, (6, 12, 24)),
        (6, (6, 12, 24)),
        (3, (3, 6, 12, 24)),
        (1, (2, 8, 16, 32)),
    ],
)
def test_depths_double_through_the_designs_own(own, depths):
    assert default_depths(Design(own)) == depths


def test_a_depth_that_cannot_change_is_the_only_one():
    assert default_depths(Design(7, resizable=NEITHER)) == (7,)
    with pytest.raises(NormLabError, match="cannot be changed: it has 7 blocks"):
        run(Design(7, resizable=NEITHER), depths=(7, 14))


def test_every_depth_and_seed_is_run_the_cheapest_and_the_own_first(bursts):
    found = run(Design(), seeds=2, max_seconds=1000)
    assert bursts == [(depth, None, seed) for depth in (6, 48, 24, 12) for seed in (0, 1)]
    assert list(found.bursts) == [6, 12, 24, 48]
    (ladder,) = found.ladders.values()
    assert ladder.depths == (6, 12, 24, 48)
    assert {(p.seed, p.when) for p in ladder.profiles} == {(s, w) for s in (0, 1) for w in ("before", "after")}
    assert found.notes == ()


@pytest.mark.parametrize(
    ("seconds", "depths"),
    [
        (90.0, (6, 12, 24, 48)),
        # Growth takes a second depth of twelve blocks or more: 48 is run if it leaves time for one.
        (89.9, (6, 12, 48)),
        (66.0, (6, 12, 48)),
        (65.9, (6, 12, 24)),
        (41.9, (6, 12)),
        (17.9, (6,)),
        (1.0, (6,)),
    ],
)
def test_what_does_not_fit_is_left_out_and_the_span_kept(bursts, seconds, depths):
    found = run(Design(), max_seconds=seconds)
    assert tuple(found.bursts) == depths
    left_out = [depth for depth in (6, 12, 24, 48) if depth not in depths]
    if left_out:
        (note,) = found.notes
        assert f"depth {', '.join(map(str, left_out))} left out to stay within {seconds:g} s" in note


def test_theory_sees_the_deepest_model_up_to_the_designs_own_depth(bursts):
    seen = []
    run(Design(12), seen, max_seconds=1000)
    assert seen == [(12, 0), (12, 30)]
    assert [depth for depth, _, _ in bursts] == [6, 12, 24]
    seen.clear()
    run(Design(), seen, max_seconds=1000)
    assert seen == [(48, 0), (48, 30)]


def test_theory_sees_the_deepest_model_that_fits(bursts):
    seen = []
    run(Design(), seen, max_seconds=60)
    assert seen == [(24, 0), (24, 30)]


def test_theory_sees_a_fresh_model_where_the_end_came_unforeseen(bursts):
    seen = []
    run(Design(), seen, max_seconds=7)
    assert seen == [(6, 0)]


def test_budget_goes_by_the_price_of_the_last_work(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(ladders.time, "perf_counter", clock)
    budget = Budget(10.0)
    assert budget.fits(1e9)
    budget.paid(2.0, 4.0)
    assert budget.price(3.0) == 6.0
    clock.now = 4.0
    assert budget.left == 6.0
    assert budget.fits(3.0)
    assert not budget.fits(3.01)


def test_widths_around_the_designs_own(bursts):
    rungs, notes = width_ladder(Design(), CheckConfig(width_ladder=True), say_nothing, depth=12)
    assert [rung.width for rung in rungs] == [32, 64, 128]
    assert all(rung.ladder.depths == (12,) for rung in rungs)
    assert notes == ()


def test_the_widths_named_as_far_as_time_allows(bursts):
    config = CheckConfig(widths=(256, 16), max_seconds=3.1)
    rungs, (note,) = width_ladder(Design(), config, say_nothing, depth=12)
    assert [rung.width for rung in rungs] == [16]
    assert "width 256 left out" in note
    rungs, (note,) = width_ladder(Design(resizable=NEITHER), config, say_nothing, depth=12)
    assert rungs == []
    assert "cannot be changed" in note


def test_residual_steps_of_a_scheme_that_has_one():
    target = resolve("peri", width=16, length=8, batch_size=2)
    rungs, notes = step_ladder(target, CheckConfig(**QUICK), say_nothing, depth=4)
    assert [(rung.step, rung.depth) for rung in rungs] == [(0.1, 4), (0.3, 4), (1.0, 4)]
    # Every branch returns an RMS of one: the larger the step, the larger the state.
    sizes = [rung.before.rms for rung in rungs]
    assert sizes == sorted(sizes)
    assert all(rung.after.G is not None and rung.after.loss is not None for rung in rungs)
    assert notes == ()


def test_a_design_without_a_residual_step_says_so():
    assert step_ladder(Design(), CheckConfig(), say_nothing, depth=4) == (
        [],
        ("no residual-step ladder: this design has no residual step to change",),
    )


def test_a_ladder_of_real_bursts():
    target = resolve("post", width=16, length=8, batch_size=2)
    found = depth_ladder(target, CheckConfig(depths=(3, 2), **QUICK), say_nothing, own_depth=3)
    (ladder,) = found.ladders.values()
    assert ladder.depths == (2, 3)
    assert found.curves.keys() == {"2", "3"}
    assert all(len(curve) == 3 for curve in found.curves.values())


@pytest.mark.parametrize(
    ("rungs", "own", "order"),
    [
        ((6, 12, 24, 48), 48, [6, 48, 24, 12]),
        ((6, 12, 24), 12, [6, 12, 24]),
        ((12, 24, 96), 48, [12, 24, 96]),
        ((24, 48), 12, [24, 48]),
        ((7,), 7, [7]),
    ],
)
def test_the_cheapest_tells_the_price_and_the_own_depth_comes_next(rungs, own, order):
    assert by_importance(rungs, own) == order


def test_a_rung_that_seemed_too_dear_is_run_once_the_price_is_known_better(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(ladders.time, "perf_counter", clock)
    budget, run_in_order = Budget(100.0), []
    for rung in budget.affordable([1, 40, 10], float):
        run_in_order.append(rung)
        # The first one pays for what is done but once.
        seconds = 5.0 if rung == 1 else rung
        clock.now += seconds
        budget.paid(rung, seconds)
    assert run_in_order == [1, 10, 40]


def growing(exponents):
    """Bursts of a second a block whose state ends at depth^p, with p by seed."""

    def burst(target, *, depth, width=None, seed=0, steps=30, lr="auto", inspect=None):
        first = profile(depth, seed=seed)
        last = profile(depth, lambda k: (1.0 + k) ** exponents[seed], seed=seed, step=steps)
        looks = [{"stack": first}, {"stack": last}]
        return Burst(before=looks[0], after=looks[1], losses=[1.0], lr=1e-3, seconds=float(depth), parameters=1)

    return burst


@pytest.mark.parametrize(
    ("exponents", "seeds", "finding"),
    [
        # One seed for more growth than linear, two against it.
        ((1.5, 0.9, 1.0), 3, "linear"),
        ((1.5, 1.5, 1.52), 3, "super-linear"),
        ((0.9, 1.5, 1.5), 1, "linear"),
    ],
)
def test_a_close_call_gets_the_seeds_for_an_interval(monkeypatch, exponents, seeds, finding):
    monkeypatch.setattr(ladders, "burst", growing(exponents))
    found = depth_ladder(Design(), CheckConfig(max_seconds=1e6), say_nothing, own_depth=48)
    (ladder,) = found.ladders.values()
    assert [len(found.bursts[depth]) for depth in (6, 12, 24, 48)] == [1, 1, seeds, seeds]
    assert classify(ladder).name == finding
    assert bool(found.notes) == (seeds > 1)


def test_a_close_call_without_time_is_left_open(bursts, monkeypatch):
    monkeypatch.setattr(ladders, "burst", growing((1.5, 1.5, 1.5)))
    # A second a block: two more seeds at 24 and 48 blocks take 144.
    found = depth_ladder(Design(), CheckConfig(max_seconds=143.0), say_nothing, own_depth=48)
    (ladder,) = found.ladders.values()
    assert {len(runs) for runs in found.bursts.values()} == {1}
    law = classify(ladder)
    assert (law.name, law.doubtful) == ("linear", True)


def test_a_short_ladder_of_residual_steps_keeps_both_ends(monkeypatch):
    clock, target = Clock(), Design()
    monkeypatch.setattr(ladders.time, "perf_counter", clock)
    target.with_step = lambda size: target

    def burst(target, *, depth, seed=0, steps=30, lr="auto"):
        clock.now += 1.0
        looks = [{"stack": profile(depth, step=step)} for step in (0, steps)]
        return Burst(before=looks[0], after=looks[1], losses=[1.0], lr=1e-3, seconds=1.0, parameters=1)

    monkeypatch.setattr(ladders, "burst", burst)
    rungs, (note,) = step_ladder(target, CheckConfig(max_seconds=2.5), say_nothing, depth=4)
    assert [rung.step for rung in rungs] == [0.1, 1.0]
    assert "residual step 0.3 left out" in note
