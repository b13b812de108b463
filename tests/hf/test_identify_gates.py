"""Gates in place of additions, norms that scale their input, factors on the whole state."""

import pytest
import torch
import transformers
from torch import nn

from normlab import NormLabError, hf
from normlab.hf.conversion.foreign_gate import GateOptions, ModelGate, recognise_gate
from normlab.hf.conversion.foreign_norm import recognise_norm
from normlab.schemes.highway import Highway

from .zoo import GEMMA4, ZOO, answer, inputs

pytestmark = pytest.mark.filterwarnings("ignore:.* has trained weights")


class Gated(nn.Module):
    """(1 − t)⊙x + t⊙f with what is kept left open."""

    def __init__(self, keep, temperature: float = 0.5):
        super().__init__()
        self.logit, self.keep, self.heat = nn.Parameter(torch.zeros(6)), keep, temperature

    def forward(self, state, update):
        gate = torch.sigmoid(self.logit / self.heat)
        return self.keep(gate) * state + gate * update


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (lambda t: 1 - t, GateOptions("complement", 0.5)),
        (lambda t: (1 - t * t).sqrt(), GateOptions("variance", 0.5)),
        (lambda t: 1 - t / 2, None),
        (lambda t: torch.ones_like(t), None),
    ],
)
def test_a_gate_is_recognised_by_what_it_keeps(keep, expected):
    assert recognise_gate(Gated(keep)) == expected


@pytest.mark.parametrize("module", [nn.Linear(6, 6), nn.LayerNorm(6), nn.Bilinear(2, 2, 2), nn.PReLU(6)])
def test_other_modules_are_no_gates(module):
    assert recognise_gate(module) is None


def test_gates_of_our_own_are_recognised_alike():
    step = Highway(keep="variance", temperature=0.3).bind(depth=2, dim=8).block(0).steps[0]
    assert recognise_gate(step.write) == GateOptions("variance", 0.3)


def test_the_bound_of_a_models_gate_holds():
    gate = Gated(lambda t: (1 - t * t).sqrt())
    nn.init.normal_(gate.logit)
    write = ModelGate(gate)
    x, f = torch.randn(2, 500, 6, generator=torch.Generator().manual_seed(0))
    largest = [float(one.square().mean(-1).sqrt().max()) for one in (x, f, write(x, f).detach())]
    assert largest[2] <= write.rms_bound(*largest[:2])


class InputScaled(nn.Module):
    def __init__(self, offset: float):
        super().__init__()
        self.weight, self.offset, self.eps = nn.Parameter(torch.ones(8)), offset, 1e-5

    def forward(self, x):
        x = x * (self.offset + self.weight)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize(("offset", "form"), [(0.0, "plain"), (1.0, "offset")])
def test_a_norm_that_scales_its_input_is_one_without_gain(offset, form):
    found = recognise_norm(InputScaled(offset))
    assert found is not None
    assert (found.norm, found.eps, found.gain, found.input_gain) == ("rms", 1e-5, "none", form)


@pytest.mark.full
def test_another_temperature_is_read_from_the_gates():
    found = hf.identify(ZOO["muse-spark"].build(residual_gate_temperature=0.7)).scheme
    assert "temperature=0.7" in str(found)


@pytest.mark.full
def test_explicit_options_of_norms_take_precedence_over_the_models():
    converted = hf.convert(ZOO["muse-spark"].build(), "highway(eps=0.001)")
    assert converted.layers[0].normlab.block.steps[0].read.eps == 1e-3


def test_the_factor_on_the_state_is_kept_under_another_scheme():
    model = ZOO["gemma4"].build()
    converted = hf.convert(model, "pre")
    batch = inputs(model)
    with torch.no_grad():
        before = answer(converted(**batch))
        for layer in converted.model.layers:
            layer.layer_scalar.mul_(2.0)
        assert not torch.equal(answer(converted(**batch)), before)
    assert any("'layer_scalar' multiplies the whole state" in line for line in hf.identify(model).how)


def gemma4(**changes):
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this version of transformers has no Gemma 4")
    torch.manual_seed(0)
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**(GEMMA4 | changes))).eval()


def test_inputs_of_every_layer_are_a_third_branch():
    """Gemma 4's per-layer inputs: a product with an argument of the layer."""
    model = gemma4(hidden_size_per_layer_input=8, vocab_size_per_layer_input=61)
    with pytest.raises(NormLabError, match=r"x \+ post_per_layer_input_norm\(per_layer_input_gate\(x\)\)"):
        hf.identify(model)
    converted = hf.convert(model, "pre")
    assert len(converted.model.layers[0].normlab.block.steps) == 3
    assert bool(answer(converted(**inputs(model))).isfinite().all())


def test_experts_beside_the_mlp_are_refused_with_their_norms():
    model = gemma4(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16)
    with pytest.raises(NormLabError, match="through pre_feedforward_layernorm, pre_feedforward_layernorm_2"):
        hf.identify(model)


def test_a_shared_final_norm_stays_where_the_scheme_has_the_same():
    model = ZOO["nanochat"].build()
    converted = hf.convert(model, "geonorm")
    assert bool(answer(converted(**inputs(model))).isfinite().all())
    with pytest.raises(NormLabError, match=r"uses 'model.norm' elsewhere, too"):
        hf.convert(model, "mhc")
