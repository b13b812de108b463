"""Weights that are taken away come back whole, or not at all."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from normlab.errors import NormLabError
from normlab.train.storage import weights
from normlab.train.storage.checkpoint import Checkpoints
from normlab.train.storage.weights import export_safetensors, load_weights, read_metadata
from tests.train.runs import same_tensors
from tests.train.storage.saved import Run, full_disk, names


def test_exported_weights_come_back(tmp_path):
    path = tmp_path / "model.safetensors"
    run, other = Run(), Run(seed=1)
    config = {"config": {"dim": 32, "name": "</script> grüße"}, "step": 3}
    export_safetensors(run.model, path, config)
    assert names(tmp_path) == ["model.safetensors"]
    assert read_metadata(path) == config
    load_weights(path, other.model)
    same_tensors(other.tensors(), run.tensors())
    same_tensors(load_file(path), run.tensors())


def test_equal_weights_make_equal_files(tmp_path):
    """safetensors writes its two entries of metadata in either order; ten files of one order have a chance of 2⁻⁹."""
    run, paths = Run(), [tmp_path / f"{number}.safetensors" for number in range(10)]
    for path in paths:
        export_safetensors(run.model, path, {"name": "grüße \u2028 \x7f"})
    assert len({path.read_bytes() for path in paths}) == 1
    assert read_metadata(paths[0]) == {"name": "grüße \u2028 \x7f"}


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    model, other = Tied(), Tied()
    export_safetensors(model, tmp_path / "model.safetensors", {})
    assert list(load_file(tmp_path / "model.safetensors")) == ["embedding.weight"]
    load_weights(tmp_path / "model.safetensors", other)
    assert torch.equal(other.head.weight, model.head.weight)
    assert other.head.weight is other.embedding.weight
    optimiser = torch.optim.AdamW(model.parameters())
    Checkpoints(tmp_path / "checkpoints").save(1, model=model, optimiser=optimiser, extra={})
    again = Tied()
    Checkpoints(tmp_path / "checkpoints").load(again, torch.optim.AdamW(again.parameters()))
    assert torch.equal(again.head.weight, model.head.weight)


def test_weights_of_another_model_change_nothing(tmp_path):
    export_safetensors(Run(scheme="peri").model, tmp_path / "model.safetensors", {})
    other = Run()
    before = other.tensors()
    with pytest.raises(NormLabError, match="holds another model"):
        load_weights(tmp_path / "model.safetensors", other.model)
    same_tensors(other.tensors(), before)


@pytest.mark.parametrize("content", [None, b"", b"\x08\x00\x00\x00\x00\x00\x00\x00notjson!", b"\xff" * 100])
def test_a_file_that_holds_no_weights(tmp_path, content):
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_bytes(content)
    for read in (read_metadata, lambda path: load_weights(path, Tied())):
        with pytest.raises(NormLabError, match=f"cannot read {path}: ") as caught:
            read(path)
        assert "\n" not in str(caught.value)


def test_a_failed_export_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    export_safetensors(Tied(), path, {"step": 1})
    monkeypatch.setattr(weights, "save_file", full_disk)
    with pytest.raises(NormLabError, match="No space left on device"):
        export_safetensors(Tied(), path, {"step": 2})
    assert read_metadata(path) == {"step": 1}
    assert names(tmp_path) == ["model.safetensors"]
