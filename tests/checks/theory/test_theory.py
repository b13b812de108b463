"""Theory beside measurement: the record, its verdicts, and that looking changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import normlab
from normlab.checks.theory.analysis import theory
from normlab.checks.theory.records import GradientSlope, Theory, TheoryLook
from normlab.errors import NormLabError
from normlab.probes.probe import measure
from normlab.probes.profile import Profile
from tests.matrix import parametrize
from tests.targets.tiny import batch_for, hugging_face

TOKENS = torch.randint(16, (2, 6), generator=torch.Generator().manual_seed(0))
SCHEMES = [*normlab.list_schemes(), "peri(step=0.1)", "mix(post_fraction=0.5)", "rezero"]


def ours(scheme: str, depth: int = 4, **changes) -> normlab.Decoder:
    sizes = {"dim": 16, "heads": 2, "hidden": 24, "vocab_size": 16, "init_std": 0.2, "tied": False}
    torch.manual_seed(0)
    return normlab.Decoder(normlab.DecoderConfig(scheme=scheme, depth=depth, **{**sizes, **changes}))


def target_of(model: nn.Module, batch=TOKENS):
    """The part of a target that theory asks."""
    if isinstance(model, normlab.Decoder):
        loss = lambda model, batch: model.loss(batch, batch)  # noqa: E731
    else:
        loss = lambda model, batch: model(**batch).loss  # noqa: E731
    return SimpleNamespace(batches=lambda seed: iter([batch]), loss=loss, blocks=None)


def look_at(model: nn.Module, batch=TOKENS, *, step: int = 0, before: Theory | None = None) -> Theory:
    target = target_of(model, batch)
    profile = measure(model, batch, target.loss, step=step)
    return theory(target, model, profile, before=before)


@parametrize("scheme", SCHEMES, quick=["pre", "post", "geonorm", "ngpt", "hybrid", "peri(step=0.1)", "rezero"])
def test_every_scheme_gets_its_theory(scheme):
    found = look_at(ours(scheme))
    assert found.scheme == str(normlab.scheme(scheme))
    assert found.growth in ("bounded", "random walk", "linear", "exponential")
    assert found.forward
    assert found.backward
    assert found.certificate
    assert len(found.predicted) == len(found.before.certificate) == len(found.before.used) == 5
    assert found.predicted[0] == pytest.approx(found.before.used[0] * found.before.certificate[0])
    assert found.after is None
    assert [verdict.level for verdict in found.verdicts()] == ["ok"] * len(found.verdicts())
    assert all(share <= 1 + found.slack for share in found.before.used_by_largest if share is not None)


def test_the_record_survives_json():
    first = look_at(ours("geonorm"))
    both = look_at(ours("geonorm"), step=30, before=first)
    for found in (first, both, look_at(hugging_face("llama"), batch_for("llama"))):
        assert Theory.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found
    with pytest.raises(NormLabError, match="field of theory"):
        Theory.from_dict({**first.to_dict(), "certifcate": ""})


def test_before_and_after_the_burst():
    model = ours("pre")
    first = look_at(model)
    with torch.no_grad():
        for layer in model.stack.layers:
            layer.branches[1].down.weight *= 3.0
    both = look_at(model, step=30, before=first)
    assert both.before == first.before
    assert both.scale_test == first.scale_test
    assert both.after.step == 30
    before, after = (look.slopes[1].values for look in (both.before, both.after))
    # Λ is linear in the last matrix.
    assert after == pytest.approx([3.0 * value for value in before])
    assert "mlp: Λ" in both.slopes
    assert "3.00 times its start after training" in both.slopes
    assert "attention: Λ" in both.slopes
    assert both.after.certificate[-1] > both.before.certificate[-1]


def test_slopes_that_grow_with_depth_are_named():
    model = ours("pre", depth=6)
    state = model.stack.layers[0].branches.state_dict()
    with torch.no_grad():
        for place, layer in enumerate(model.stack.layers):
            layer.branches.load_state_dict(state)
            layer.branches[1].down.weight *= (place + 1) ** 0.5
    found = look_at(model)
    attention, mlp = found.before.slopes
    assert not attention.trend.grows
    assert mlp.trend.grows
    assert mlp.trend.exponent == pytest.approx(0.5)
    assert "mlp: Λ" in found.slopes
    assert ", grows with depth (exponent 0.50" in found.slopes
    assert ", does not grow with depth (exponent 0.00" in found.slopes


@parametrize(
    ("scheme", "growth", "last"),
    [
        # RMS after 8 sublayers at initialisation for an entry of RMS 2, by hand.
        ("pre", "linear", math.sqrt(4 + 8)),
        ("peri(step=0.5, entry_norm=False)", "linear", math.sqrt(4 + 0.25 * 8)),
        ("lns", "random walk", math.sqrt(4 + 2 * (1 + 1 / 2 + 1 / 3 + 1 / 4))),
        ("mix(post_fraction=0.5)", "linear", math.sqrt(1 + 4)),
        ("none", "exponential", 2 * 16.0),
        ("geonorm(entry_norm=False)", "bounded", 2.0),
        ("post", "bounded", 1.0),
        ("post(norm='l2')", "bounded", 0.25),
        ("keel", "bounded", 1.0),
        ("ngpt", "bounded", 0.25),
    ],
    quick=["pre", "lns", "none", "geonorm(entry_norm=False)", "post", "ngpt"],
)
def test_predicted_laws(scheme, growth, last):
    model = ours(scheme)
    with torch.no_grad():
        model.embedding.weight *= 2.0 / model.embedding.weight.square().mean(-1, keepdim=True).sqrt()
    found = look_at(model)
    assert found.growth == growth
    assert found.predicted[0] == pytest.approx(0.25 if scheme == "ngpt" else 2.0)
    assert found.predicted[-1] == pytest.approx(last)


def test_a_law_that_is_exact_at_initialisation_lies_on_the_measured_curve():
    for scheme in ("post", "deepnorm", "geonorm", "ngpt", "spannorm"):
        model = ours(scheme)
        target = target_of(model)
        profile = measure(model, TOKENS, target.loss)
        # The first norm meets embeddings that are no larger than its epsilon can be seen at: 10⁻⁶ over 0.04.
        assert theory(target, model, profile).predicted == pytest.approx(profile.rms, rel=1e-4)


def test_attention_that_reads_the_state_itself_is_told():
    told = "; attention reads the state itself: scores grow with the square of it"
    assert told in look_at(ours("output")).backward
    # A query-key norm stands between the two.
    assert told not in look_at(ours("olmo2")).backward
    assert told not in look_at(ours("pre")).backward


def test_norm_drift_and_clamped_angles():
    found = look_at(ours("geonorm"))
    assert found.before.drift <= found.slack
    assert len(found.before.clamped) == 4
    assert all(0.0 <= share <= 1.0 for share in found.before.clamped)
    assert [verdict.name for verdict in found.verdicts()] == ["certificate", "norm drift"]
    assert look_at(ours("ngpt")).before.clamped == ()
    assert look_at(ours("pre")).before.drift is None


# -- failing loudly ---------------------------------------------------------------------------------------------------


@parametrize("scheme", ["post", "peri", "geonorm", "ngpt"], quick=["post", "geonorm"])
def test_a_violated_certificate_fails_and_names_the_block(scheme):
    model = ours(scheme)
    model.stack.layers[2].register_forward_hook(lambda _layer, _args, state: state * 100.0)
    certificate = look_at(model).verdicts()[0]
    assert certificate.name == "certificate"
    assert certificate.finding == "certificate violated"
    assert certificate.level == "fail"
    assert certificate.layers[0] == 2
    assert certificate.value > certificate.threshold
    assert "a bug in model or certificate; block" in certificate.words


def test_a_drifting_length_fails():
    model = ours("geonorm")
    model.stack.layers[1].register_forward_hook(lambda _layer, _args, state: state * 0.99)
    certificate, drift = look_at(model).verdicts()
    # Shorter is within the bound, and still not what the scheme promises.
    assert certificate.level == "ok"
    assert (drift.finding, drift.level) == ("norm drift", "fail")
    assert drift.value == pytest.approx(0.01, rel=1e-3)


def test_a_state_above_a_bound_of_zero_is_a_violation():
    look = TheoryLook(step=0, certificate=(0.0, 0.0), used_by_largest=(None, 1e30))
    assert Theory(depth=1, before=look).verdicts()[0].level == "fail"


def test_what_is_not_finite_is_no_violation():
    model = ours("pre")
    model.stack.layers[1].branches[1].down.weight.data.fill_(math.nan)
    found = look_at(model)
    assert found.before.certificate[2:] == (None, None, None)
    assert found.before.used[2:] == (None, None, None)
    assert found.certificate.startswith("no certificate at this depth")
    assert found.verdicts()[0].level == "ok"
    json.dumps(found.to_dict(), allow_nan=False)


# -- models of others -------------------------------------------------------------------------------------------------


def test_a_foreign_model_gets_slopes_and_the_scale_test():
    found = look_at(hugging_face("llama"), batch_for("llama"))
    assert found.scheme is None
    assert found.growth is None
    assert [slope.branch for slope in found.before.slopes] == ["self_attn.o_proj", "mlp.down_proj"]
    assert all(len(slope.values) == 3 for slope in found.before.slopes)
    assert "all 6 branches tested proportional" in found.scale
    (certificate,) = found.verdicts()
    assert certificate.finding == "not measured"
    assert certificate.words == "not measured: the scheme is not known"


def test_matrices_without_a_role_are_a_note():
    found = look_at(hugging_face("neox"), batch_for("neox"))
    assert found.before.slopes == ()
    assert found.notes[0].startswith("no slopes from the weights: no role for attention.query_key_value.weight")
    assert "proportional" in found.scale


def test_two_stacks_are_told_apart():
    found = look_at(hugging_face("t5"), batch_for("t5"))
    assert {row.branch.partition(":")[0] for row in found.scale_test} == {"encoder.block", "decoder.block"}


def test_a_stack_in_somebody_elses_model():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 16)
            self.stack = normlab.Stack("peri", [_sublayers() for _ in range(3)], 16).init_()

        def forward(self, tokens):
            return self.stack(self.table(tokens))

    model = Model()
    target = SimpleNamespace(
        batches=lambda seed: iter([TOKENS]), loss=lambda model, batch: model(batch).square().mean(), blocks=None
    )
    found = theory(target, model, measure(model, TOKENS, target.loss))
    assert found.scheme == "peri"
    assert found.before.used_by_largest[0] == pytest.approx(1.0)
    assert found.verdicts()[0].level == "ok"


def _sublayers() -> tuple[nn.Module, nn.Module]:
    return normlab.models.Attention(16, 2), normlab.models.MLP(16, 24)


def test_a_scheme_without_a_law_is_checked_by_what_is_proven():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Silent(type(normlab.scheme("peri"))):
        name = "silent"

        def law(self, depth):
            raise NormLabError("silent states no law")

    model = ours("pre")
    model.stack = normlab.Stack(Silent(), [_sublayers() for _ in range(3)], 16).init_()
    found = look_at(model)
    assert found.growth is None
    assert found.predicted == ()
    assert found.notes == ("silent states no law",)
    assert "from the gains alone" in found.certificate


# -- nothing is changed -----------------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was():
    model = ours("geonorm").train()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    look_at(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_empty_theory_has_a_verdict_and_a_record():
    empty = Theory(depth=3)
    assert [verdict.finding for verdict in empty.verdicts()] == ["not measured"]
    assert Theory.from_dict(empty.to_dict()) == empty
    assert TheoryLook(step=0).use is None
    assert GradientSlope(branch="mlp", values=(1.0, None)).trend is None


def test_the_profile_need_not_know_the_entry():
    model = ours("pre")
    found = theory(target_of(model), model, Profile(boundaries=5))
    assert found.predicted == ()
