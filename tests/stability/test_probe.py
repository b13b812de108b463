"""A look at a live model: right numbers for any output and any loop, the culprit named, nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from normlab import Decoder, DecoderConfig, NormLabError
from normlab.stability import measures
from normlab.stability.probe import measure, measure_stacks, probe
from normlab.stability.profile import BLOCK, BOUNDARY, Profile
from normlab.train.profile import states_of
from tests.stability.tiny import MODELS, batch_for, hugging_face

SIZE = {"depth": 3, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": 61, "max_length": 64, "hidden": 48}


def decoder(scheme: str = "pre", **options) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(scheme=scheme, init_std=0.1, **{**SIZE, **options}))


def text(batch: int = 4, length: int = 12, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 61, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, batch) -> torch.Tensor:
    return model.loss(*batch)  # type: ignore[operator]


class Block(nn.Module):
    def __init__(self, dim: int = 8):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(self.norm(x))


class Tower(nn.Module):
    """Blocks in a loop; `forward` may be replaced by a subclass."""

    def __init__(self, blocks: list[nn.Module] | None = None, dim: int = 8):
        super().__init__()
        self.embed = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(blocks or [Block(dim) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def same(one: Profile, other: Profile, tolerance: float = 0.0, but: tuple[str, ...] = ()) -> None:
    for name in (*BOUNDARY, *BLOCK, "loss"):
        if name in but:
            continue
        a, b = getattr(one, name), getattr(other, name)
        rows = zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]
        for left, right in rows:
            assert (left is None) == (right is None), name
            assert left is None or left == pytest.approx(right, rel=tolerance, abs=tolerance), name


# -- the right numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["pre", "post", "peri(step=0.1)", "none", "dual", "geonorm", "ngpt"])
def test_every_boundary_against_plain_states(scheme):
    model, batch = decoder(scheme), text()
    profile = measure(model, batch, loss_of)
    with states_of(model) as states:
        model.loss(*batch).backward()
    hidden = [model.stack.hidden(state.detach()) for state in states]
    for place, (state, h) in enumerate(zip(states, hidden, strict=True)):
        assert state.grad is not None
        assert profile.rms[place] == pytest.approx(h.square().mean().sqrt().item(), rel=1e-6)
        gradient = float(model.stack.hidden(state.grad).double().norm())
        # Two runs of the same fp32 sums, the norm itself in fp32: some hundred roundings at most.
        assert profile.grad_h[place] == pytest.approx(gradient, rel=1e-5)
    for place in range(3):
        step = hidden[place + 1] - hidden[place]
        assert profile.branch_rms[place] == pytest.approx(float(step.square().mean().sqrt()), rel=1e-5)
        expected = measures.block(hidden[place], hidden[place + 1])
        assert profile.absorb_bf16[place] == pytest.approx(float(expected["absorb_bf16"]))
        norms = [p.grad.norm() for p in model.stack.layers[place].parameters() if p.grad is not None]
        assert profile.grad_w[place] == pytest.approx(float(torch.stack(norms).norm()), rel=1e-5)
    assert profile.loss == pytest.approx(model.loss(*batch).item(), rel=1e-6)
    assert profile.nan_first is None
    assert not profile.unfit
    assert None not in profile.attn_entropy
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict(), allow_nan=False))) == profile


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
        for field in (*BOUNDARY, *BLOCK[:-5], "loss"):
            if field != "upd_ratio":
                assert None not in (getattr(profile, field) or [None]) if field != "loss" else profile.loss is not None
        # Gemma 2 caps its logits, which fused attention cannot: it is written out and not seen.
        assert (None in profile.attn_entropy) == (name == "gemma2")
        assert profile.nan_first is None


def test_half_precision_is_measured_in_single():
    model = decoder("none", bias=True)
    with torch.no_grad():
        model.embedding.weight.mul_(3000.0)
    expected = model.embedding(text()[0]).square().mean().sqrt()
    profile = measure(model.to(torch.float16), text(), lambda model, batch: model(batch[0]).float().square().mean())
    # Rounding the table to 11 bits moves no entry by more than 2^-11; squares of it overflow fp16.
    assert expected > 255
    assert profile.rms[0] == pytest.approx(expected.item(), rel=2**-10)
    bf16 = measure(decoder().bfloat16(), text(), loss_of)
    wide = measure(decoder(), text(), loss_of)
    assert bf16.rms == pytest.approx(wide.rms, rel=0.05)


def test_fused_and_unfused_attention_have_the_same_statistics():
    model, batch = decoder(), text()
    fused = measure(model, batch, loss_of)
    with sdpa_kernel(SDPBackend.MATH):
        unfused = measure(model, batch, loss_of)
    same(fused, unfused, 1e-4)


def test_eager_attention_of_others_does_no_harm():
    seen = measure(hugging_face("llama"), batch_for("llama"))
    unseen = measure(hugging_face("llama", attn_implementation="eager"), batch_for("llama"))
    assert unseen.attn_entropy == [None, None, None]
    same(seen, unseen, 1e-4, but=("attn_entropy", "attn_entropy_low_share", "logit_max", "sink"))


def test_attention_belongs_to_the_block_that_called_it():
    model = decoder()
    attention = model.stack.layers[1].branches[0]
    attention.softmax_scale = 1e4
    profile = measure(model, text(), loss_of)
    entropy, sharp = profile.attn_entropy, profile.logit_max
    assert None not in entropy
    assert entropy[1] < 0.1 < min(entropy[0], entropy[2])
    assert sharp[1] > 100 * max(sharp[0], sharp[2])


# -- what blocks may return ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    weights: torch.Tensor
    state: torch.Tensor


WRAPPERS = {
    "tuple": (lambda x: (x, None), lambda out: out[0]),
    "list after others": (lambda x: [torch.ones(2, 2), torch.zeros(1), x], lambda out: out[2]),
    "dict": (lambda x: {"weights": torch.ones(3, 3), "state": x}, lambda out: out["state"]),
    "dataclass": (lambda x: Result(torch.ones(3, 3), x), lambda out: out.state),
}


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("by_name", [False, True])
def test_tuples_dicts_and_dataclasses(kind, by_name):
    wrap, unwrap = WRAPPERS[kind]

    class Wrapped(Block):
        def forward(self, x, mask=None):
            assert mask is None or not mask.requires_grad
            return wrap(super().forward(x))

    class Wrapping(Tower):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = unwrap(layer(mask=torch.zeros(5, 5), x=x) if by_name else layer(x))
            return {"loss": x.square().mean(), "logits": x}

    torch.manual_seed(1)
    plain = Tower()
    wrapped = Wrapping([Wrapped() for _ in range(3)])
    wrapped.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 8)
    expected, found = measure(plain, x), measure(wrapped, x)
    same(found, expected)
    assert found.logits_rms == pytest.approx(expected.rms[-1])


def test_a_block_without_a_state_is_one_clear_line():
    class Mute(Block):
        def forward(self, x):
            return None

    with pytest.raises(NormLabError, match="without a hidden state"):
        measure(Tower([Mute(), Mute()]), torch.randn(2, 5, 8))


def test_a_model_without_a_loss_is_one_clear_line():
    with pytest.raises(NormLabError, match="returned no loss"):
        measure(decoder(), text()[0])


def test_a_block_that_writes_over_its_input_is_not_compared_with_it():
    class Inplace(Block):
        def forward(self, x):
            return x.add_(self.mix.weight.sum())

    with torch.no_grad(), probe(tower := Tower([Inplace() for _ in range(3)])) as look:
        tower(torch.randn(2, 5, 8))
    assert look.profile.branch_rms == [None, None, None]
    assert [rms is None for rms in look.profile.rms] == [True, False, False, False]


# -- loops of all kinds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant):
    class Checkpointed(Tower):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x.square().mean()

    torch.manual_seed(1)
    plain = Tower()
    model = Checkpointed()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 8)
    same(measure(model, x), measure(plain, x), 1e-6)


def test_checkpointing_of_our_decoder_and_of_hugging_face():
    same(measure(decoder(checkpointing=True), text(), loss_of), measure(decoder(), text(), loss_of), 1e-6)
    model, batch = hugging_face("llama").train(), batch_for("llama")
    expected = measure(model, batch)
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        same(measure(model, batch | {"use_cache": False}), expected, 1e-6)


WITHIN_A_PASS = ("var_data", "erank", "stable_rank")


def test_accumulation_equals_one_large_batch():
    # 4 x 12 rows of attention: all of them are looked at in one batch and in two.
    model, (inputs, targets) = decoder(), text()
    whole = measure(model, (inputs, targets), loss_of)
    with probe(model) as look:
        for part in (slice(0, 2), slice(2, 4)):
            loss = model.loss(inputs[part], targets[part])
            look.record(loss=loss)
            (loss / 2).backward()
    same(look.profile, whole, 1e-5, but=WITHIN_A_PASS)
    batch = batch_for("gpt2", batch=4)
    theirs = hugging_face("gpt2")
    whole = measure(theirs, batch)
    with probe(theirs) as look:
        for part in (slice(0, 2), slice(2, 4)):
            (theirs(**{name: value[part] for name, value in batch.items()}).loss / 2).backward()
    same(look.profile, whole, 1e-4, but=WITHIN_A_PASS)


def test_passes_of_different_size_weigh_by_their_tokens():
    model, (inputs, targets) = decoder(), text()
    whole = measure(model, (inputs, targets), loss_of)
    with probe(model) as look:
        for part, weight in ((slice(0, 1), 0.25), (slice(1, 4), 0.75)):
            (model.loss(inputs[part], targets[part]) * weight).backward()
    for name in ("rms", "mean_abs", "kurtosis", "outlier_ratio", "grad_h", "branch_ratio", "ang", "grad_w"):
        assert getattr(look.profile, name) == pytest.approx(getattr(whole, name), rel=1e-5), name


def test_passes_are_told_apart_even_if_nobody_calls_the_owner():
    tower = Tower()
    x = torch.randn(4, 5, 8)
    whole = measure(tower, x)
    with probe(tower) as look:
        for part in (x[:2], x[2:]):
            (tower.forward(part) / 2).backward()
    same(look.profile, whole, 1e-5, but=(*WITHIN_A_PASS, "loss"))


@pytest.mark.parametrize("called", [True, False])
def test_a_shared_block_is_measured_at_every_call(called):
    class Looped(Tower):
        def forward(self, x):
            x = self.embed(x)
            for _ in range(2):
                for layer in self.layers:
                    x = layer(x)
            return x.square().mean()

    torch.manual_seed(1)
    model = Looped([Block(), Block()])
    unrolled = Tower([model.layers[0], model.layers[1], model.layers[0], model.layers[1]])
    unrolled.embed = model.embed
    x = torch.randn(2, 5, 8)
    profile = measure(model, x, lambda model, x: model(x) if called else model.forward(x))
    assert profile.depth == 4
    same(profile, measure(unrolled, x))
    states = [model.embed(x)]
    for k in range(4):
        states.append(model.layers[k % 2](states[-1]))
    assert profile.rms == pytest.approx([h.square().mean().sqrt().item() for h in states], rel=1e-6)


def test_frozen_parameters():
    model, batch = decoder(tied=False), text()
    expected = measure(model, batch, loss_of)
    for parameter in [*model.embedding.parameters(), *model.stack.layers[0].parameters()]:
        parameter.requires_grad_(False)
    profile = measure(model, batch, loss_of)
    assert profile.grad_h == pytest.approx(expected.grad_h, rel=1e-6)
    assert profile.grad_w == [None, *expected.grad_w[1:]]
    with probe(model) as look:
        model.loss(*batch).backward()
    # A look at somebody else's step does not make it compute gradients that it had no use for.
    assert look.profile.grad_h[:2] == [None, None]
    assert look.profile.grad_h[2:] == pytest.approx(expected.grad_h[2:], rel=1e-6)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert measure(model, batch, loss_of).grad_h == pytest.approx(expected.grad_h, rel=1e-6)


def test_a_state_that_the_caller_owns_stays_a_state_without_gradient():
    tower = Tower()
    tower.embed = nn.Identity()  # type: ignore[assignment]
    x = torch.randn(2, 5, 8)
    assert None not in measure(tower, x).grad_h
    assert not x.requires_grad
    assert x.grad is None


def test_without_a_backward_pass_there_are_no_gradients():
    model, batch = decoder(), text()
    with torch.inference_mode(), probe(model) as look:
        model(batch[0])
    assert look.profile.grad_h == [None] * 4
    assert look.profile.grad_w == [None] * 3
    assert None not in look.profile.rms + look.profile.ang


# -- updates ---------------------------------------------------------------------------------------------------------


def test_update_ratio_of_a_real_step():
    model, batch = decoder(), text()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = [[p.detach().clone() for p in layer.parameters()] for layer in model.stack.layers]
    with probe(model) as look:
        model.loss(*batch).backward()
        optimiser.step()
        optimiser.zero_grad()
    for place, (layer, old) in enumerate(zip(model.stack.layers, before, strict=True)):
        moved = math.hypot(*(float((p.detach() - q).norm()) for p, q in zip(layer.parameters(), old, strict=True)))
        size = math.hypot(*(float(q.norm()) for q in old))
        # All matrices here have fewer entries than are kept: nothing is estimated.
        assert look.profile.upd_ratio[place] == pytest.approx(moved / size, rel=1e-5)
    # Cleared inside the step, and measured all the same.
    assert None not in look.profile.grad_w


def test_update_ratio_of_large_matrices_is_an_estimate():
    class Wide(Block):
        def __init__(self):
            super().__init__(256)

    tower = Tower([Wide(), Wide()], dim=256)
    with probe(tower) as look:
        tower(torch.randn(1, 3, 256))
        with torch.no_grad():
            tower.layers[0].mix.weight.add_(torch.randn(256, 256) * 1e-3)
    size = math.hypot(*(p.norm().item() for p in tower.layers[0].parameters()))
    # 4096 draws of a squared Gaussian: relative error √(2/4096) = 2 %, half of it in the root; the size alike.
    assert look.profile.upd_ratio[0] == pytest.approx(256 * 1e-3 / size, rel=0.1)
    assert look.profile.upd_ratio[1] == 0.0


def test_no_step_no_update_ratio():
    assert measure(decoder(), text(), loss_of).upd_ratio == [None, None, None]


# -- what is not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_planted_value_is_named_with_its_module_and_step(block, value):
    model = decoder()
    down = model.stack.layers[block].branches[1]
    matrix = next(module for module in down.modules() if isinstance(module, nn.Linear))
    with torch.no_grad():
        matrix.weight[0, 0] = value
    profile = measure(model, text(), loss_of, step=7)
    assert profile.nan_first is not None
    assert profile.nan_first.startswith(f"stack.layers.{block}.branches.1")
    assert profile.nan_first.endswith("at step 7")
    assert profile.first_broken == block + 1
    assert "loss" in profile.unfit
    json.dumps(profile.to_dict(), allow_nan=False)


def test_the_module_inside_a_hugging_face_block_is_named():
    model = hugging_face("llama")
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda _m, _a, output: output * math.nan)  # type: ignore
    profile = measure(model, batch_for("llama"), step=3)
    assert profile.nan_first == "model.layers.1.mlp.up_proj at step 3"
    assert profile.broken[:2] == [0.0, 0.0]
    assert profile.broken[2] == 1.0


def test_a_bad_embedding_and_a_bad_loss_are_told_from_bad_blocks():
    model = decoder()
    with torch.no_grad():
        model.embedding.weight[5] = math.nan
    inputs, targets = text()
    inputs[0, 0] = 5
    profile = measure(model, (inputs, targets), loss_of)
    assert profile.nan_first == "embedding at step 0"
    assert profile.first_broken == 0
    assert 0.0 < profile.broken[0] < 1.0
    profile = measure(decoder(), text(), lambda model, batch: model.loss(*batch) * math.nan)
    assert profile.nan_first == "the loss at step 0"


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * math.nan


def test_a_gradient_that_breaks_on_the_way_back_is_named():
    class Breaks(Block):
        def forward(self, x):
            return NanBackward.apply(super().forward(x))

    profile = measure(Tower([Block(), Block(), Block()]), torch.randn(2, 5, 8))
    assert profile.nan_first is None
    tower = Tower([Block() for _ in range(4)])
    tower.layers[1].__class__ = Breaks
    profile = measure(tower, torch.randn(2, 5, 8), blocks="layers.*", step=2)
    assert profile.nan_first == "the gradient of layers.1 at step 2"
    assert profile.broken == [0.0] * 5
    assert profile.grad_broken == [1.0, 1.0, 0.0, 0.0, 0.0]
    profile = measure(Tower(), torch.randn(2, 5, 8), lambda model, x: NanBackward.apply(model(x)))
    assert profile.nan_first == "the gradient that reaches layers at step 0"


def test_a_parameter_gradient_alone_can_be_broken():
    tower = Tower()
    tower.layers[2].mix.bias.register_hook(lambda grad: grad * math.nan)
    profile = measure(tower, torch.randn(2, 5, 8))
    assert profile.nan_first == "the gradient of layers.2 at step 0"
    assert profile.grad_w[2] is None
    assert not profile.gradient_broken


def test_the_pass_that_broke_is_told_from_the_one_before():
    model, batch = decoder(), text()
    matrix = next(module for module in model.stack.layers[1].branches[1].modules() if isinstance(module, nn.Linear))
    with probe(model, step=4) as look:
        model.loss(*batch).backward()
        with torch.no_grad():
            matrix.weight.fill_(math.nan)
        model.loss(*batch).backward()
    assert look.profile.nan_first is not None
    assert look.profile.nan_first.startswith("stack.layers.1.branches.1")
    assert look.profile.nan_first.endswith("(call 2) at step 4")
    assert look.profile.broken == [0.0, 0.0, 0.5, 0.5]


# -- compiled models -------------------------------------------------------------------------------------------------


class Stepping(Decoder):
    """A decoder whose call is its loss."""

    def forward(self, *batch):  # type: ignore[override]
        return self.loss(*batch)


# Torch's compiler asks every tensor for its gradient and hides the warning this gives, but not from an error filter.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", ["wrapped", "in place", "blocks in place", "blocks wrapped"])
@pytest.mark.parametrize("warm", [False, True])
def test_compiled_models_are_measured_as_they_were_written(how, warm, no_default_device):
    torch.manual_seed(0)
    plain = Stepping(DecoderConfig(init_std=0.1, **SIZE))
    batch = text()
    expected = measure(plain, batch)
    torch.compiler.reset()
    called: nn.Module = plain
    if how == "wrapped":
        called = torch.compile(plain, backend="eager")  # type: ignore[assignment]
    elif how == "in place":
        plain.compile(backend="eager")
    for k, layer in enumerate(list(plain.stack.layers)):
        if how == "blocks in place":
            layer.compile(backend="eager")
        elif how == "blocks wrapped":
            plain.stack.layers[k] = torch.compile(layer, backend="eager")  # type: ignore[assignment]
    if how == "blocks wrapped":
        # Our stack passes the blocks by where nobody listens to them; a wrapper has no such way.
        plain.stack.checkpointing = True
    if warm:
        called(*batch).backward()
    same(measure(called, batch), expected, 1e-5)
    if how == "wrapped":
        with probe(plain) as look:
            called(*batch).backward()
        same(look.profile, expected, 1e-5, but=("grad_w",) if warm else ())
    assert called(*batch).item() == pytest.approx(expected.loss, rel=1e-5)
    torch.compiler.reset()


def test_parts_of_blocks_can_be_named_as_blocks():
    # The attention of a scheme whose state is two streams returns one.
    profile = measure(decoder("dual"), text(), loss_of, blocks="stack.layers.*.branches.0")
    assert profile.depth == 3
    assert None not in profile.rms


def test_blocks_that_nobody_hears_are_refused():
    class Quiet(Tower):
        def forward(self, x):
            for layer in self.layers:
                x = layer.forward(x)
            return x.square().mean()

    with pytest.raises(NormLabError, match=r"layers\.0, layers\.1, layers\.2 did not run, or unheard"):
        measure(Quiet(), torch.randn(2, 5, 8))

    class Skips(Tower):
        def forward(self, x):
            return self.layers[2](self.layers[0](x)).square().mean()

    with pytest.raises(NormLabError, match=r"layers\.1 did not run"):
        measure(Skips(), torch.randn(2, 5, 8))


# -- nothing is left behind ------------------------------------------------------------------------------------------


def hooks_on(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_modules = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    return on_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def test_the_model_is_as_it_was():
    class Counting(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            self.count += 1
            return self.drop(super().forward(x))

    model = Tower([Counting() for _ in range(3)]).train()
    model.layers[1].eval()
    x = torch.randn(2, 5, 8)
    model(x).backward()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: p.grad for name, p in model.named_parameters()}
    copies = {name: grad.clone() for name, grad in grads.items() if grad is not None}
    random, flags = torch.get_rng_state(), [module.training for module in model.modules()]
    first = measure(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name]
        assert torch.equal(parameter.grad, copies[name])
    assert hooks_on(model) == 0
    assert measure(model, x) == first


def test_gradients_stay_if_asked_for():
    model = Tower()
    x = torch.randn(2, 5, 8)
    measure(model, x, keep_grads=True)
    kept = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), kept, strict=True))


@pytest.mark.parametrize("probed", [True, False])
def test_a_probe_does_not_change_the_step(probed):
    def train(watched: bool) -> list[torch.Tensor]:
        model = decoder()
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            with probe(model, step=step, active=watched) if probed else nullcontext():
                optimiser.zero_grad()
                model.loss(*text(seed=step)).backward()
                optimiser.step()
        return [torch.rand(1), *model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(train(True), train(False), strict=True))


def test_an_idle_probe_installs_nothing():
    model, attention = decoder(), F.scaled_dot_product_attention
    with probe(model, active=False) as look:
        assert hooks_on(model) == 0
        assert F.scaled_dot_product_attention is attention
        look.record(loss=torch.ones(()))
    assert look.profiles == {}
    with pytest.raises(NormLabError, match="active=True"):
        _ = look.profile


def test_a_step_that_raises_keeps_its_error_and_loses_the_hooks():
    model, attention = decoder(), F.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError), probe(model):
        model.loss(*text()).backward(gradient=torch.tensor(1 / 0))
    assert hooks_on(model) == 0
    assert F.scaled_dot_product_attention is attention


def test_there_is_no_profile_before_the_end():
    model = decoder()
    with probe(model) as look:
        with pytest.raises(NormLabError, match="after the with block"):
            _ = look.profile
        model.loss(*text()).backward()
    assert look.profile.depth == 3


class Waiting(TorchDispatchMode):
    """Counts the operations that make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = ("_local_scalar_dense", "nonzero", "equal.default", "is_nonzero", "masked_select")
        self.count += any(wait in str(func) for wait in waits)
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_during_the_step():
    model, batch = decoder(), text()
    model.loss(*batch).backward()
    with Waiting() as alone:
        model.loss(*batch).backward()
    with probe(model) as look, Waiting() as probed:
        model.loss(*batch).backward()
    assert look.profile.depth == 3
    assert probed.count == alone.count
