"""Factories: called with the sizes that they take, refused before they fill the memory, found in the current folder."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn

from normlab import NormLabError
from normlab.probes.blocks import find_stacks
from normlab.targets import resolve
from tests.targets.own_models import SMALL, Reader, Tower, runs
from tests.targets.tiny import batch_for, hugging_face


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
from tests.targets.own_models import Reader

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
        ("mine:wrong", r"returned an object of type str; expected factory\(depth, width\)"),
        ("mine:double", "asked for 12 blocks, it built 24; expected depth to be the number of repeated blocks"),
        ("mine:plain", "Linear has no repeated blocks"),
        ("mine:value", "mine:value is of type int and cannot be called"),
        ("mine:biuld", "mine has no 'biuld'"),
        ("nowhere:build", "nowhere cannot be imported .ModuleNotFoundError: No module named 'nowhere'"),
        ("torn:build", "torn cannot be imported .SyntaxError"),
        ("mine.py:biuld", "mine.py has no 'biuld'"),
        ("torn.py:build", "torn.py, line 1: invalid syntax"),
        ("nowhere.py:build", "cannot read .*nowhere.py: No such file"),
        ("mine.py:build(depth=3)", "mine.py:build is not a scheme; expected a class derived from normlab.Scheme"),
        ("mine:", "cannot read 'mine:' as module:factory"),
        (":build", "cannot read ':build' as module:factory"),
        ("mine.txt:build", r"mine\.txt is not a Python file; expected file\.py:factory"),
        ("a b:c", "cannot read 'a b:c' as module:factory"),
        ("mine:a:b", "cannot read 'mine:a:b' as module:factory"),
    ],
)
def test_one_line_for_a_factory_that_is_no_target(here, spelling, match):
    (here / "mine.txt").write_text("")
    with pytest.raises(NormLabError, match=match) as error:
        resolve(spelling, **SMALL)
    assert "\n" not in str(error.value)
