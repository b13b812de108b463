"""Other people's models, built from their configuration classes: whole profiles without a special case."""

from __future__ import annotations

import math

import pytest

from normlab.probes.probe import measure, measure_stacks
from normlab.probes.profile import BLOCK, BOUNDARY
from tests.probes.loops import same
from tests.targets.tiny import MODELS, batch_for, hugging_face


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "olmo2"])
def test_hugging_face_against_its_own_hidden_states(name):
    model, batch = hugging_face(name), batch_for(name)
    profile = measure(model, batch)
    output = model(**batch, output_hidden_states=True)
    # The library's last state comes after the final norm.
    states = output.hidden_states[:-1]
    for state in states:
        state.retain_grad()
    output.loss.backward()
    for place, state in enumerate(states):
        assert profile.rms[place] == pytest.approx(state.square().mean().sqrt().item(), rel=1e-5)
        assert profile.grad_h[place] == pytest.approx(float(state.grad.norm()), rel=1e-4)
    assert profile.loss == pytest.approx(output.loss.item(), rel=1e-6)
    logits = output.logits.detach()
    assert profile.logits_rms == pytest.approx(float(logits.square().mean().sqrt()), rel=1e-5)
    assert profile.logsumexp == pytest.approx(float(logits.logsumexp(-1).mean()), rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_every_hugging_face_model_gets_whole_profiles(name):
    profiles = measure_stacks(hugging_face(name), batch_for(name))
    assert [profile.depth for profile in profiles.values()] == ([3, 2] if name == "t5" else [3])
    for profile in profiles.values():
        for field in {*BOUNDARY, *BLOCK} - {"upd_ratio"}:
            assert None not in getattr(profile, field), field
        assert profile.loss is not None
        assert profile.nan_first is None
        assert [len(heads) for heads in profile.attn_heads] == [4] * profile.depth


def test_attention_that_is_written_out_has_the_same_statistics():
    fused = measure(hugging_face("llama"), batch_for("llama"))
    written_out = measure(hugging_face("llama", attn_implementation="eager"), batch_for("llama"))
    same(fused, written_out, 1e-4)
    for one, other in zip(fused.attn_heads, written_out.attn_heads, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_the_module_inside_a_hugging_face_block_is_named():
    model = hugging_face("llama")
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda _m, _a, output: output * math.nan)  # type: ignore
    profile = measure(model, batch_for("llama"), step=3)
    assert profile.nan_first == "model.layers.1.mlp.up_proj at step 3"
    assert profile.broken[:2] == [0.0, 0.0]
    assert profile.broken[2] == 1.0
