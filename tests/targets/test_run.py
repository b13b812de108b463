"""A run folder as a target: its design at any size, or its weights as they are."""

from __future__ import annotations

import math

import pytest
import torch

from normlab import DecoderConfig, EncoderConfig, NormLabError, TrainConfig, VisionConfig, load_run
from normlab.targets import resolve
from normlab.targets.run import resized
from normlab.train.trainer import train

TEXT = "".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(300))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMLAB_CACHE", str(root / "cache"))
        (root / "text.txt").write_text(TEXT)
        model = DecoderConfig(scheme="peri", depth=2, dim=32, heads=4, kv_heads=2)
        config = TrainConfig(
            model=model, data=(str(root / "text.txt"),), length=32, batch=4, tokens=1024, evals=1, saves=0, base_dim=16
        )
        assert train(config, root / "peri", progress=False).state == "done"
        yield root / "peri"


@pytest.mark.parametrize("spelling", [str, lambda path: path, lambda path: str(path / "config.json")])
def test_the_design_of_a_run(folder, spelling):
    target = resolve(spelling(folder))
    assert (target.kind, target.name, target.depth, target.width) == ("run", "peri", 2, 32)
    assert str(target.scheme) == "peri"
    assert target.notes == ("vocab_size 320 -> 64, as many as the data has",)
    model = target.build(depth=5, width=64, seed=1)
    config = model.config
    assert (config.depth, config.dim, config.heads, config.kv_heads, config.head_dim) == (5, 64, 8, 4, 8)
    assert target.loss(model, next(target.batches())).item() == pytest.approx(math.log(64), abs=0.5)
    assert target.with_step(0.1).build().config.scheme.step == 0.1


def test_the_weights_of_a_run(folder):
    target = resolve(folder, weights=True, data=str(folder.parent / "text.txt"))
    assert target.resizable == frozenset()
    assert target.notes == ()
    model = target.build()
    for name, weight in load_run(folder).model.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    with torch.no_grad():
        model.embedding.weight.zero_()
    assert target.build().embedding.weight.any(), "a burst must not change what the next build gives"
    batch = next(target.batches())
    assert target.loss(target.build(), batch).item() == load_run(folder).model.loss(*batch).item()
    assert batch[0].max() < 257
    assert target.with_step(0.1) is None
    with pytest.raises(NormLabError, match="peri: its depth is 2 and cannot be changed"):
        target.build(depth=4)
    (note,) = resolve(folder, weights=True).notes
    assert note.startswith("trained weights on bigram tokens")


def test_a_run_without_weights_says_so(tmp_path):
    from normlab.train.storage.folder import RunFolder

    (tmp_path / "young").mkdir()
    RunFolder(tmp_path / "young").begin(TrainConfig(), "cpu")
    assert resolve(tmp_path / "young").depth == 4
    with pytest.raises(NormLabError, match="has no weights and no checkpoint yet"):
        resolve(tmp_path / "young", weights=True)


def test_another_width_keeps_heads_groups_and_proportions():
    config = DecoderConfig(dim=96, heads=6, kv_heads=2, hidden=256, experts=2, shared_hidden=32)
    wide = resized(config, 192)
    assert (wide.heads, wide.kv_heads, wide.head_dim, wide.hidden, wide.shared_hidden) == (12, 4, 16, 512, 64)
    assert resized(config, 96) is config
    assert resized(config, 16).heads == 3


@pytest.fixture(scope="module")
def others(folder):
    """Runs of an encoder and of a vision Transformer."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    shape, run = {"scheme": "peri", "depth": 2, "dim": 32, "heads": 4}, {"batch": 4, "evals": 1, "saves": 0}
    text = (str(folder.parent / "text.txt"),)
    masked = TrainConfig(task="masked", model=EncoderConfig(**shape), data=text, length=32, tokens=512, **run)
    images = TrainConfig(task="images", model=VisionConfig(**shape), images=16, **run)
    for config in (masked, images):
        assert train(config, folder.parent / config.task, progress=False).state == "done"
    return folder.parent


@pytest.mark.parametrize("task", ["masked", "images"])
@pytest.mark.parametrize("weights", [False, True], ids=["design", "weights"])
def test_runs_of_other_tasks(others, task, weights):
    target = resolve(others / task, weights=weights)
    model = target.build() if weights else target.build(depth=3, width=64)
    assert type(model) is type(load_run(others / task).model)
    assert model.config.depth == (2 if weights else 3)
    batch = next(target.batches())
    loss = target.loss(model, batch)
    answers = min(model.config.answers, 65 if task == "masked" else 10)
    assert loss.item() == pytest.approx(math.log(answers), rel=0.6)
    assert target.twin() is None
    if task == "masked":
        hidden = 257 if weights else 64
        assert (batch[0] == hidden).any()
        assert (batch[1][batch[0] == hidden] < hidden).all()


def test_a_text_in_the_run_of_an_encoder(others):
    target = resolve(others / "masked", data=str(others / "text.txt"))
    inputs, targets = next(target.batches())
    assert inputs.max() == 319
    assert targets.max() < 257
