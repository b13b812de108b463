"""A whole check, small: what it measures, what it leaves alone, what it does with targets that it cannot use."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import normlab
from normlab.checks import check as checks
from normlab.checks import learning_rates
from normlab.checks.check import SlowCheck, check_length, own_depth, share_reference
from normlab.checks.config import CheckConfig
from normlab.checks.ladders import Budget
from normlab.checks.result import Check
from normlab.errors import NormLabError
from normlab.targets import resolve
from tests.checks import broken

QUICK = {"width": 16, "length": 8, "batch_size": 2, "steps": 2}


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.back(torch.relu(self.wide(self.norm(x))))


class Model(nn.Module):
    """Somebody's model, with a state that a check could disturb."""

    def __init__(self, depth: int = 3, width: int = 8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.register_buffer("calls", torch.zeros(()))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        self.calls += 1
        for block in self.blocks:
            x = self.dropout(block(x))
        return x


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.fixture(scope="module")
def report() -> Check:
    torch.manual_seed(0)
    return normlab.check("peri", depths=(12, 3), seeds=2, **QUICK)


def test_a_check_has_every_depth_seed_and_look(report):
    assert report.ladder.depths == (3, 12)
    keys = {(p.depth, p.seed, p.step) for p in report.ladder.profiles}
    assert keys == {(depth, seed, step) for depth in (3, 12) for seed in (0, 1) for step in (0, 2)}
    assert {name: len(curve) for name, curve in report.curves.items()} == {"3": 3, "12": 3}


def test_a_check_says_what_was_checked(report):
    target = report.target
    assert (target.name, target.kind, target.depth, target.width) == ("peri", "scheme", 12, 16)
    built = resolve("peri", width=16).build(depth=12)
    assert target.parameters == sum(parameter.numel() for parameter in built.parameters())
    assert report.config["depths"] == [12, 3]
    assert report.versions["normlab"] == normlab.__version__
    assert report.seconds > 0.0
    assert report.verdict("forward").finding == "not judged"


def test_theory_is_that_of_the_deepest_model(report):
    assert report.theory is not None
    assert report.theory.depth == 12
    assert [look.step for look in report.theory.looks] == [0, 2]
    assert len(report.procedure) == 5


def test_a_check_survives_json(report):
    assert Check.from_json(report.to_json()) == report
    assert json.loads(report.to_json())["target"]["name"] == "peri"


def test_all_ladders(report):
    options = {"depths": (3, 12), "width_ladder": True, "widths": (16, 32), "step_ladder": True, **QUICK}
    found = normlab.check("peri", **options)
    assert [rung.width for rung in found.widths] == [16, 32]
    assert [rung.step for rung in found.steps] == [0.1, 0.3, 1.0]
    # Residual steps at the second largest depth, widths at the second smallest.
    assert [rung.depth for rung in found.steps] == [3, 3, 3]
    assert found.widths[0].ladder.depths == (12,)


@pytest.mark.full
def test_the_rates_of_two_checks_share_the_lower_reference(monkeypatch):
    monkeypatch.setattr(learning_rates, "STEPS", 3)
    first, second = (normlab.check(name, depths=(2, 3), lr_ladder=True, **QUICK) for name in ("peri", "pre"))
    assert first.rates.twin.name == "pre"
    assert first.rates.twin.losses == second.rates.losses
    assert (first.rates.depth, first.rates.rates, second.rates.twin) == (3, learning_rates.RATES, None)
    shared = share_reference(first, second)
    assert {check.rates.reference for check in shared} == {min(first.rates.reference, second.rates.reference)}


def test_a_live_module_is_left_as_it_was():
    model, batch = Model().eval(), torch.randn(2, 5, 8)
    model.blocks[0].wide.weight.grad = torch.ones_like(model.blocks[0].wide.weight)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.random.get_rng_state()
    found = normlab.check(model, batch=batch, loss_fn=squared, steps=3, lr=1e-2)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert torch.equal(model.blocks[0].wide.weight.grad, torch.ones_like(model.blocks[0].wide.weight))
    assert model.blocks[1].wide.weight.grad is None
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert found.ladder.depths == (3,)
    before, after = found.profile("before"), found.profile("after")
    assert after.loss < before.loss


def test_a_factory_is_built_at_every_depth():
    asked = []

    def factory(depth: int, width: int) -> nn.Module:
        asked.append(depth)
        return Model(depth, 8)

    found = normlab.check(factory, batch=torch.randn(2, 5, 8), loss_fn=squared, depths=(2, 4), steps=2)
    assert found.ladder.depths == (2, 4)
    assert {2, 4} <= set(asked)


def test_a_model_that_breaks_still_gives_a_report():
    class Breaks(Model):
        def forward(self, x):
            out = super().forward(x)
            return out * float("nan") if self.calls > 4 else out

    model = Breaks().eval()
    found = normlab.check(model, batch=torch.randn(2, 5, 8), loss_fn=squared, steps=9)
    forward = found.verdict("forward")
    assert (forward.finding, forward.level) == ("exploding", "fail")
    assert "first in Breaks at step 4" in forward.words
    assert [loss is None for loss in found.curves["3"]] == [False] * 4 + [True]
    assert found.failed("exploding")
    assert Check.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("peery", "peri"),
        ("peri(step=7)", "step must lie"),
        (nn.Linear(3, 3), "no repeated blocks"),
        (nn.ModuleList(nn.ReLU() for _ in range(4)), "no repeated blocks|no parameters"),
    ],
)
def test_a_target_that_cannot_be_checked_is_refused_in_one_line(target, message):
    with pytest.raises(NormLabError, match=message) as caught:
        normlab.check(target, batch=torch.randn(2, 3), loss_fn=squared)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 4}, "unknown option of a check 'depth'; did you mean 'depths'"),
        ({"depths": (4, 4)}, "different whole numbers from 2 on, got 4,4"),
        ({"depths": ()}, "at least one depth"),
        ({"depths": (1,)}, "from 2 on"),
        ({"steps": 0}, "steps must be a whole number from 1 on"),
        ({"lr": -1.0}, "lr must be a positive number"),
        ({"max_seconds": float("nan")}, "max_seconds must be a positive number"),
        ({"dtype": "fp8"}, "unknown number format 'fp8'"),
        ({"fail_on": ("explodes",)}, "exploding"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(NormLabError, match=message):
        normlab.check("pre", **options)


class Design:
    def __init__(self, kind: str, depth: int):
        self.kind, self.depth = kind, depth


@pytest.mark.parametrize(
    ("kind", "depth", "depths", "own"),
    [
        ("scheme", 48, None, 48),
        ("scheme", 48, (6, 12), 12),
        ("scheme", 48, (12, 96), 96),
        ("hugging face", 32, None, 32),
        ("hugging face", 32, (8, 16), 32),
        ("hugging face", 32, (32, 64), 64),
    ],
)
def test_the_depth_to_judge_at(kind, depth, depths, own):
    assert own_depth(Design(kind, depth), CheckConfig(depths=depths)) == own


def test_two_checks_without_rates_share_nothing(report):
    assert share_reference(report, report) == (report, report)


def test_two_stacks_are_judged_both(monkeypatch):
    from normlab.checks.ladders import DepthLadder
    from tests.checks.synthetic import ladder

    calm, wild = ladder(depths=(12, 24)), ladder(lambda k: 1.5**k, depths=(12, 24))
    target = resolve("pre", width=16)
    session = checks._Session(target, CheckConfig(depths=(12, 24)), lambda words: None)
    shown, verdicts = session._judge(DepthLadder({"encoder": calm, "decoder": wild}, {}))
    assert shown is wild
    forward = next(verdict for verdict in verdicts if verdict.name == "forward")
    assert forward.finding == "exploding"
    assert forward.words.startswith("decoder: ")
    assert "encoder, decoder" in session.notes[0]


def test_options_replace_those_of_a_configuration():
    config = CheckConfig(depths=(2, 3), start_size="none", **QUICK)
    assert normlab.check("pre", config=config, depths=(2, 4)).ladder.depths == (2, 4)
    with pytest.raises(NormLabError, match="unknown option of a check 'depth'; did you mean 'depths'"):
        normlab.check("pre", config=config, depth=4)
    with pytest.raises(NormLabError, match="unknown option of a check 'depth'"):
        normlab.check_coordinates("pre", config=config, depth=4)


@pytest.mark.parametrize("name", ["lr_ladder", "width_ladder", "step_ladder"])
def test_a_coordinate_check_refuses_what_it_would_leave_out(name):
    with pytest.raises(NormLabError, match=f"a coordinate check has no {name}"):
        CheckConfig(coordinates=True, **{name: True})


def test_a_reference_loss_takes_a_ladder_of_rates():
    with pytest.raises(NormLabError, match="add --lr-ladder"):
        CheckConfig(reference_loss=2.0)


def test_the_start_of_a_scheme_is_that_of_the_deepest_stack_that_was_asked_for():
    found = normlab.check("pre", depths=(2, 3), **QUICK | {"start_size": "tiny"})
    assert [start.name for start in found.starts if start.judged] == ["3 blocks, width 16", "tiny"]


def test_no_random_number_of_the_callers_is_used_up_by_a_factory():
    def factory(depth: int = 2, width: int = 8) -> tuple[nn.Module, torch.Tensor, object]:
        return Model(depth, 8), torch.randn(2, 5, 8), squared

    curves = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        generator = torch.random.get_rng_state()
        found = normlab.check(factory, depths=(2, 3), steps=2, start_size="none")
        coordinates = normlab.check_coordinates(factory, depths=(2, 3), steps=1)
        assert torch.equal(torch.random.get_rng_state(), generator)
        curves.append((found.curves, coordinates.axes))
    # Batch and dropout are the same, whatever was drawn before.
    assert curves[0] == curves[1]


def test_wiring_is_judged_in_the_deepest_model_even_if_its_turn_came_unforeseen(monkeypatch):
    """A rung that seemed too dear is inspected after all: block 3, which the smaller one does not have, is at fault."""
    monkeypatch.setattr(Budget, "fits", lambda budget, work: work != 3 + 6)
    found = normlab.check(broken.detached_mlp_once, depths=(3, 6), steps=2, length=16, batch_size=4, start_size="none")
    verdict = found.verdict("untrained")
    assert (verdict.level, verdict.layers, verdict.module) == ("fail", (3,), "blocks.3.mlp")


def test_a_length_that_does_not_fit_is_refused_at_once(monkeypatch):
    monkeypatch.setattr("normlab.utils.machine.free_memory", lambda _device: 16 << 30)
    with pytest.raises(NormLabError, match=r"8 × 100,000 tokens needs about .*try a smaller --length or --batch-size"):
        normlab.check("pre", length=100_000)


def test_a_long_length_is_told_of():
    target = resolve("pre", length=1025, batch_size=1)
    with pytest.warns(SlowCheck, match="square of --length"):
        check_length(target)
