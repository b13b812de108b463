"""Live modules and factories: taken as they are, run on what they read, refused in one line."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn

import normlab
from normlab import Decoder, DecoderConfig, NormLabError
from normlab.probes.blocks import find_stacks
from normlab.probes.probe import measure
from normlab.targets import resolve
from tests.targets.tiny import batch_for, hugging_face

SMALL = {"length": 8, "batch_size": 2}


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(self.norm(x))


class Tower(nn.Module):
    """States in, states out."""

    def __init__(self, depth: int = 3, width: int = 8):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Reader(Tower):
    """Token ids in, states or logits out."""

    def __init__(self, depth: int = 3, width: int = 8, rows: int = 64, *, head: bool = True):
        super().__init__(depth, width)
        self.embedding = nn.Embedding(rows, width)
        self.head = nn.Linear(width, rows) if head else nn.Identity()

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "logits" if isinstance(self.head, nn.Linear) else "states": self.head(super().forward(self.embedding(ids)))
        }


def runs(target) -> float:
    model, batch = target.build(), next(target.batches())
    loss = target.loss(model, batch)
    loss.backward()
    free = [p for p in model.parameters() if p.requires_grad]
    assert any(p.grad is not None for p in free)
    return loss.item()


# -- live modules ------------------------------------------------------------------------------------------------------


def test_a_module_is_itself_with_its_batch():
    model, batch = Tower(), torch.randn(2, 5, 8)
    target = resolve(model, batch=batch, loss_fn=lambda m, b: m(b).square().mean())
    assert (target.kind, target.name, target.depth, target.resizable) == ("module", "Tower", 3, frozenset())
    assert target.build(depth=3, seed=1) is model
    assert next(target.batches(1)) is batch
    assert target.loss(model, batch).item() == pytest.approx(model(batch).square().mean().item())
    assert target.unigram is None
    assert target.twin() is None
    with pytest.raises(NormLabError, match="Tower: its depth is 3 and cannot be changed; leave out depth 6"):
        target.build(depth=6)


def test_a_published_model_answers_with_its_own_loss():
    model, batch = hugging_face("llama"), batch_for("llama")
    target = resolve(model, batch=batch)
    assert (target.depth, target.width) == (3, 32)
    assert runs(target) == pytest.approx(model(**batch).loss.item())
    assert measure(model, batch, target.loss).depth == 3


@pytest.mark.parametrize(
    ("build", "task"),
    [
        (Tower, "States"),
        (Reader, "Logits"),
        (lambda: Reader(head=False), "States"),
        (lambda: hugging_face("gpt2"), "Logits"),
    ],
    ids=["tower", "reader", "headless", "gpt2"],
)
def test_a_batch_is_guessed_from_what_the_module_reads(build, task):
    target = resolve(build(), length=48, batch_size=8)
    assert type(target.task).__name__ == task
    # Logits of RMS s cost s²/2 above a guess; the answers' RMS is at most about 1.5 here.
    assert runs(target) == pytest.approx(math.log(target.task.data.vocabulary), abs=1.25)


def test_guessing_leaves_the_module_as_it_was():
    model = Reader()
    model.head = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 64))
    model.forward = lambda ids: model.head(model.embedding(ids).flatten(0, 1)).unflatten(0, ids.shape)
    state, seen = torch.random.get_rng_state(), model.head[1].running_mean.clone()
    target = resolve(model.train(), **SMALL)
    assert type(target.task).__name__ == "Logits"
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(seen, model.head[1].running_mean)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_decoder_brings_its_scheme_and_its_rules():
    model = Decoder(DecoderConfig(scheme="ngpt", depth=2, dim=16, heads=2, vocab_size=32, max_length=6))
    target = resolve(model, **SMALL)
    assert str(target.scheme) == "ngpt"
    assert target.width == 16
    assert next(target.batches())[0].shape == (2, 6)
    with torch.no_grad():
        model.embedding.weight.mul_(3)
    target.after_step(model)
    torch.testing.assert_close(model.embedding.weight.norm(dim=-1), torch.ones(32))
    assert all(group["weight_decay"] == 0.0 for group in target.param_groups(model, 1e-3, 0.1))


def test_a_stack_in_somebodys_model_keeps_its_rules():
    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            from normlab.models.attention import Attention
            from normlab.models.mlp import MLP

            self.embedding = nn.Embedding(64, 16)
            self.stack = normlab.Stack("deepnorm", [(Attention(16, 2), MLP(16, 32)) for _ in range(2)], dim=16).init_()

        def forward(self, ids):
            return self.stack(self.embedding(ids))

    model = Theirs()
    model.embedding.weight.requires_grad_(False)
    target = resolve(model, **SMALL)
    assert str(target.scheme) == "deepnorm"
    groups = target.param_groups(model, 1e-3, 0.1)
    held = [p for group in groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.stack.parameters()))
    assert math.isfinite(runs(target))


def test_few_of_many_tokens_are_worth_a_note():
    assert resolve(Reader(rows=64), **SMALL).notes == ()
    (note,) = resolve(Reader(rows=512), **SMALL).notes
    assert note.startswith("64 of 512 tokens occur in the data")


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4)
        self.layers = nn.ModuleList(Block(8) for _ in range(2))


class Elsewhere(Reader):
    def forward(self, ids):
        return super().forward(ids)["logits"].mean(1)


class Broken(Reader):
    def forward(self, ids):
        raise RuntimeError("the first line\nand a second")


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        (nn.Linear(4, 4), {}, "Linear has no repeated blocks"),
        (nn.Identity(), {}, "Identity has no parameters; expected a Transformer"),
        (Pixels(), {}, "Pixels: cannot tell what to run it on.* begins with a Conv2d; pass batch="),
        (Elsewhere(), {}, r"Elsewhere: returned \(2, 64\) for token ids \(2, 8\); pass batch="),
        (Broken(), {}, r"Broken: cannot be run on token ids .*\(RuntimeError: the first line\); pass batch="),
        (Tower(), {"loss_fn": lambda m, b: m(b).sum()}, "loss_fn came without a batch"),
        (Tower(), {"blocks": "towers.*"}, "no block of Tower matches"),
    ],
    ids=["no blocks", "no parameters", "pixels", "pooled", "raises", "no batch", "pattern"],
)
def test_one_line_for_a_module_that_is_no_target(model, options, match):
    with pytest.raises(NormLabError, match=match) as error:
        resolve(model, **SMALL, **options)
    assert "\n" not in str(error.value)


# -- factories ---------------------------------------------------------------------------------------------------------


def by_name(width: int, depth: int) -> nn.Module:
    return Reader(depth, width)


def by_place(layers: int, size: int) -> nn.Module:
    return Reader(layers, size)


def with_defaults(depth: int = 5, width: int = 24) -> nn.Module:
    return Reader(depth, width)


def only_depth(depth: int) -> nn.Module:
    return Reader(depth, 16)


def anything(**sizes: int) -> nn.Module:
    return Reader(**sizes)


@pytest.mark.parametrize(
    ("factory", "depth", "width", "resizable"),
    [
        (by_name, 12, 64, {"depth", "width"}),
        (by_place, 12, 64, {"depth", "width"}),
        (with_defaults, 5, 24, {"depth", "width"}),
        (only_depth, 12, None, {"depth"}),
        (anything, 12, 64, {"depth", "width"}),
        (Reader, 3, 8, {"depth", "width"}),
        (lambda: Reader(), 3, None, set()),
        (Tower, 3, 8, {"depth"}),
    ],
)
def test_a_factory_gives_what_it_takes(factory, depth, width, resizable):
    target = resolve(factory, **SMALL)
    assert (target.kind, target.depth, target.width, target.resizable) == ("factory", depth, width, resizable)
    assert math.isfinite(runs(target))
    if "depth" in resizable:
        assert len(find_stacks(target.build(depth=2))[0].blocks) == 2
    if "width" in resizable:
        assert target.build(width=20).layers[0].mix.in_features == 20
    weights = [target.build(seed=seed).layers[0].mix.weight for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_factory_may_bring_batch_and_loss():
    batch = (torch.randn(2, 5, 8), torch.zeros(2, 5, 8))

    def factory(depth, width=8):
        return Tower(depth, width), batch, lambda m, b: (m(b[0]) - b[1]).square().mean()

    target = resolve(factory, depth=4)
    assert next(target.batches(3))[0] is batch[0]
    assert target.resizable == {"depth"}
    assert runs(target) > 0
    own = resolve(lambda depth: (hugging_face("llama", num_hidden_layers=depth), batch_for("llama")), depth=2)
    assert runs(own) > 0


# -- memory of a factory -----------------------------------------------------------------------------------------------


class Laid:
    """A factory that notes every model that it made: depth, and the device of its weights."""

    def __init__(self):
        self.made: list[tuple[int, str]] = []

    def __call__(self, depth: int, width: int) -> nn.Module:
        model = Reader(depth, width)
        self.made.append((depth, model.layers[0].mix.weight.device.type))
        return model


def test_a_factory_that_cannot_fit_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr("normlab.utils.machine.free_memory", lambda device: 2**30)
    factory = Laid()
    before = torch.random.get_rng_state()
    with pytest.raises(NormLabError, match=r"has 1\.0 GiB free; try smaller --depths or --width") as refused:
        resolve(factory, depth=1000, width=2048, **SMALL)
    assert torch.equal(before, torch.random.get_rng_state())
    # A block has a matrix of 2048² and three vectors; weight, gradient and two moments of 4 bytes each.
    parameters = 1000 * (2048**2 + 3 * 2048) + sum(p.numel() for p in Reader(0, 2048).parameters())
    words = f"with {parameters / 1e9:.1f}B parameters needs about {16 * parameters / 2**30:.1f} GiB"
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert factory.made == [(16, "meta"), (32, "meta")]


def test_a_million_blocks_of_a_factory_are_refused_before_one_is_made(monkeypatch):
    monkeypatch.setattr("normlab.utils.machine.free_memory", lambda device: 2**34)
    factory = Laid()
    with pytest.raises(NormLabError, match=r"\(depth=1000000, width=8\) needs about 22.4 GiB of .* try a smaller"):
        resolve(factory, depth=10**6, width=8, **SMALL)
    assert factory.made == []


def test_a_deeper_rung_of_a_factory_is_refused_as_well(monkeypatch):
    target = resolve(Laid(), depth=2, width=256, **SMALL)
    monkeypatch.setattr("normlab.utils.machine.free_memory", lambda device: 2**30)
    target.check_room(depth=4)
    with pytest.raises(NormLabError, match=r"\(depth=2000, width=256\) with 0.1B parameters needs about 2.0 GiB"):
        target.check_room(depth=2000)


def test_a_small_factory_is_not_laid_out_twice():
    factory = Laid()
    resolve(factory, **SMALL)
    assert {device for _, device in factory.made} == {"cpu"}


def test_a_factory_that_cannot_work_on_the_meta_device_is_built_as_it_is(monkeypatch):
    def looks_at_values(depth: int, width: int) -> nn.Module:
        model = Reader(depth, width)
        assert model.layers[0].mix.weight.sum().item() != 0
        return model

    monkeypatch.setattr("normlab.utils.machine.free_memory", lambda device: 2**28)
    assert resolve(looks_at_values, depth=2, width=64, **SMALL).depth == 2


MODULE = """
import torch
from torch import nn
from tests.targets.test_module import Reader

class Holder:
    build = staticmethod(lambda depth, width: Reader(depth, width))

value = 3

def build(depth, width):
    import side_of_mine
    return Reader(depth, width)

def fails(depth, width):
    raise ValueError("no such thing\\nas this")

def leaves(depth, width):
    raise SystemExit(3)

def wrong(depth, width):
    return "a model"

def double(depth, width):
    return Reader(2 * depth, width)

def plain(depth, width):
    return nn.Linear(width, width)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "side_of_mine.py").write_text("")
    (tmp_path / "torn.py").write_text("def (")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("mine", "side_of_mine", "torn"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("spelling", ["mine:build", "mine:Holder.build", "mine.py:build"])
def test_a_factory_is_found_in_the_current_folder(here, spelling):
    before = list(sys.path)
    target = resolve(spelling, depth=2, **SMALL)
    assert (target.kind, target.name, target.depth) == ("factory", spelling, 2)
    assert math.isfinite(runs(target))
    assert sys.path == before


@pytest.mark.parametrize(
    ("spelling", "match"),
    [
        ("mine:fails", r"mine:fails\(depth=12, width=64\) failed \(ValueError: no such thing\); expected factory"),
        ("mine:leaves", r"mine:leaves\(depth=12, width=64\) failed \(SystemExit: 3\)"),
        ("mine:wrong", r"returned a str; expected factory\(depth, width\)"),
        ("mine:double", "asked for 12 blocks, it built 24; expected depth to be the number of repeated blocks"),
        ("mine:plain", "Linear has no repeated blocks"),
        ("mine:value", "mine:value is a int and cannot be called"),
        ("mine:biuld", "mine has no 'biuld'"),
        ("nowhere:build", "nowhere cannot be imported .ModuleNotFoundError: No module named 'nowhere'"),
        ("torn:build", "torn cannot be imported .SyntaxError"),
        ("mine.py:biuld", "mine.py has no 'biuld'"),
        ("torn.py:build", "torn.py, line 1: invalid syntax"),
        ("nowhere.py:build", "cannot read .*nowhere.py: No such file"),
        ("mine.py:build(depth=3)", "mine.py:build is no scheme; expected a class derived from normlab.Scheme"),
        ("mine:", "cannot read 'mine:' as module:factory"),
        (":build", "cannot read ':build' as module:factory"),
        ("a b:c", "cannot read 'a b:c' as module:factory"),
        ("mine:a:b", "cannot read 'mine:a:b' as module:factory"),
    ],
)
def test_one_line_for_a_factory_that_is_no_target(here, spelling, match):
    with pytest.raises(NormLabError, match=match) as error:
        resolve(spelling, **SMALL)
    assert "\n" not in str(error.value)
