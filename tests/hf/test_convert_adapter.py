"""A layer that cannot be followed is converted with an adapter of a few lines."""

import inspect

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from normlab import NormLabError, hf

from .zoo import answer


class OddConfig(PretrainedConfig):
    model_type = "odd"

    def __init__(self, vocab_size=31, hidden_size=16, num_hidden_layers=3, **options):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        super().__init__(**options)


class OddLayer(nn.Module):
    """Mixes tokens only where there are several of them: nobody can know that without running it."""

    def __init__(self, width: int):
        super().__init__()
        self.mix, self.feed = nn.Linear(width, width), nn.Linear(width, width)
        self.before_mix, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)

    def mixed(self, x, factor):
        return factor * self.mix(x).cumsum(1) if x.shape[1] > 1 else factor * self.mix(x)

    def forward(self, hidden, factor, wanted=False):
        hidden = hidden + self.mixed(self.before_mix(hidden), factor)
        hidden = hidden + self.feed(self.before_feed(hidden)).relu()
        return (hidden, None) if not wanted else (hidden, factor)


class OddModel(PreTrainedModel):
    config_class = OddConfig
    main_input_name = "input_ids"

    def __init__(self, config: OddConfig):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.tower = nn.ModuleList(OddLayer(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.final = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for layer in self.tower:
            hidden, _ = layer(hidden, factor=torch.tensor(0.5))
        return type("Output", (), {"logits": self.head(self.final(hidden))})


def adapter(layer: OddLayer) -> hf.LayerStructure:
    return hf.LayerStructure.of(
        layer,
        hf.ResidualBranch(lambda layer, call, x: layer.mixed(x, call["factor"]), read="before_mix"),
        hf.ResidualBranch(lambda layer, call, x: layer.feed(x).relu(), read="before_feed"),
        returns=(hf.HIDDEN_STATE, None),
    )


@pytest.fixture
def model() -> OddModel:
    return OddModel(OddConfig()).eval()


TOKENS = torch.arange(10).view(2, 5)


def test_without_one_the_reason_and_the_way_out_are_named(model):
    with pytest.raises(NormLabError, match=r"OddLayer: its forward pass cannot be followed .* pass an adapter"):
        hf.convert(model, "geonorm")


def test_it_is_short():
    assert len(inspect.getsource(adapter).splitlines()) < 20


def test_with_one_the_model_is_named_and_converted(model):
    assert hf.identify(model, adapter=adapter).scheme.name == "pre"
    same = hf.convert(model, "pre", adapter=adapter)
    assert torch.equal(answer(same(TOKENS)), answer(model(TOKENS)))
    other = hf.convert(model, "geonorm", adapter=adapter)
    logits = answer(other(TOKENS))
    assert logits.isfinite().all()
    assert not torch.equal(logits, answer(model(TOKENS)))


def test_an_adapter_that_is_wrong_is_found_out(model):
    def swapped(layer):
        found = adapter(layer)
        return hf.LayerStructure.of(layer, *reversed(found.branches), returns=found.returns)

    with pytest.raises(NormLabError, match=r"tower\.0 does more than its branches"):
        hf.convert(model, "geonorm", adapter=swapped)


@pytest.mark.parametrize("wrong", [lambda layer: layer.nothing, lambda layer: None], ids=["raises", "returns nothing"])
def test_an_adapter_that_fails_says_where(model, wrong):
    with pytest.raises(NormLabError, match=r"tower\.0: its adapter"):
        hf.convert(model, "geonorm", adapter=wrong)


def test_a_norm_that_is_none_is_refused(model):
    def no_norm(layer):
        return hf.LayerStructure.of(layer, hf.ResidualBranch(lambda layer, call, x: x, read="feed"))

    with pytest.raises(NormLabError, match=r"OddLayer\.feed \(Linear\) is no RMSNorm or LayerNorm"):
        hf.convert(model, "geonorm", adapter=no_norm)


class Willing(nn.Linear):
    """Offers what a scheme may need."""

    offers = frozenset({"v-norm", "q-norm", "k-norm"})
    head_dim = 16

    def accept(self, need, module):
        self.add_module(need, module)


def test_what_a_layer_offers_is_given_to_it(model):
    for layer in model.tower:
        layer.mix = Willing(16, 16)
    converted = hf.convert(model, "hybrid", adapter=adapter)
    assert all(set(dict(layer.mix.named_children())) == Willing.offers for layer in converted.tower)
