"""Norms without gains and norms that are functions are seen: a model is named by what it computes."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from normlab import NormLabError, hf
from normlab.hf.conversion.convert import plan_conversion
from normlab.hf.conversion.foreign_norm import NormOptions, recognise_norm
from normlab.hf.conversion.model_structure import analyse_model
from tests.matrix import quick_if

from .zoo import TEXT

WIDTH, EPS = 16, 1e-5


def rms(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def rms_with_casts(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).type_as(x)


def rms_by_division(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def torch_rms(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.size(-1),), eps=EPS)


def torch_layer(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (WIDTH,), eps=EPS)


FUNCTIONS = [rms, rms_with_casts, rms_by_division, torch_rms, torch_layer]


class Plain(nn.Module):
    """A norm without a gain, and with nothing that says how wide it is."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.eps = norm, EPS

    def forward(self, x):
        return self.norm(x)


class Pre(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.mix, self.mlp = norm, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        return x + self.mlp(self.norm(x))


class Post(Pre):
    def forward(self, x):
        x = self.norm(x + self.mix(x))
        return self.norm(x + self.mlp(x))


class Peri(Pre):
    def forward(self, x):
        x = x + self.norm(self.mix(self.norm(x)))
        return x + self.norm(self.mlp(self.norm(x)))


class Bare(Pre):
    """What looks like a norm and is none: a gate."""

    def forward(self, x):
        x = x + self.mix(x * torch.sigmoid(x))
        return x + self.mlp(x / (1.0 + x.square()))


class Model(nn.Module):
    def __init__(self, layer, norm, final):
        super().__init__()
        self.layers = nn.ModuleList([layer(norm) for _ in range(2)])
        self.final, self.head = final, nn.Linear(WIDTH, 7)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x if self.final is None else self.final(x))


def named(model: nn.Module) -> hf.Identity:
    return hf.identify(model, batch={"x": torch.randn(2, 3, WIDTH)}, blocks="layers.*")


@quick_if(lambda norm, scheme: scheme == "pre" or norm is rms)
@pytest.mark.parametrize("norm", FUNCTIONS, ids=lambda norm: norm.__name__)
@pytest.mark.parametrize(
    ("layer", "final", "scheme"), [(Pre, True, "pre"), (Post, False, "post"), (Peri, True, "peri")]
)
def test_functions_are_norms(norm, layer, final, scheme):
    found = named(Model(layer, norm, norm if final else None))
    assert (found.scheme.name, found.scheme.gain) == (scheme, "none")
    assert found.scheme.norm == ("layer" if norm is torch_layer else "rms")
    assert found.scheme.eps == pytest.approx(EPS, rel=0.02)
    assert any("reads the last block" in line for line in found.how)


@pytest.mark.parametrize("norm", [rms, torch_layer], ids=lambda norm: norm.__name__)
def test_modules_without_gains_are_norms(norm):
    module = Plain(norm)
    kind = "layer" if norm is torch_layer else "rms"
    assert recognise_norm(Plain(rms)) == NormOptions("rms", EPS, "none", False)
    found = named(Model(Pre, module, module))
    assert (found.scheme.name, found.scheme.gain, found.scheme.norm) == ("pre", "none", kind)


class Gained(Pre):
    """A function with parameters of the layer's."""

    def __init__(self, norm):
        super().__init__(norm)
        self.weight, self.bias = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        x = x + self.mix(F.layer_norm(x, (WIDTH,), self.weight, self.bias, EPS))
        return x + self.mlp(F.layer_norm(x, (WIDTH,), self.weight, self.bias, EPS))


def test_functions_may_have_parameters():
    found = named(Model(Gained, None, nn.LayerNorm(WIDTH)))
    assert (found.scheme.name, found.scheme.norm, found.scheme.gain, found.scheme.bias) == (
        "pre",
        "layer",
        "plain",
        True,
    )


def test_products_that_are_no_norms_are_none():
    assert named(Model(Bare, None, None)).scheme.name == "none"
    assert all(
        recognise_norm(part) is None for part in (nn.Identity(), nn.Dropout(), nn.GELU(), nn.Softmax(-1), nn.Tanh())
    )


def test_a_function_cannot_be_replaced():
    model = Model(Pre, rms, rms)
    found = analyse_model(model, batch={"x": torch.randn(2, 3, WIDTH)}, blocks="layers.*")
    with pytest.raises(NormLabError, match=r"computes a norm by a function \(mul\), which cannot be replaced"):
        plan_conversion(model, found, "peri")


# -- nanochat --------------------------------------------------------------------------------------------------------


@pytest.fixture
def nanochat():
    if not hasattr(transformers, "NanoChatConfig"):
        pytest.skip("this version of transformers has no NanoChat")
    torch.manual_seed(0)
    return transformers.NanoChatForCausalLM(transformers.NanoChatConfig(**TEXT)).eval()


def test_nanochat_is_pre_norm(nanochat):
    found = hf.identify(nanochat)
    assert (found.scheme.name, found.scheme.gain, found.scheme.norm) == ("pre", "none", "rms")
    assert "'model.norm' reads the last block" in found.how


def test_its_norm_before_the_first_block_is_not_changed_with_the_last(nanochat):
    with pytest.raises(NormLabError, match=r"uses 'model.norm' elsewhere, too"):
        hf.convert(nanochat, "post")
    tokens = torch.arange(5).unsqueeze(0)
    before = nanochat(tokens).logits
    assert torch.equal(hf.convert(nanochat, "pre", copy=True)(tokens).logits, before)
