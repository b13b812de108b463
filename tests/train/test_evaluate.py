"""Batches of an evaluation: several times those of training where no logits are kept, with the same result."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from normlab.data import IGNORED
from normlab.train.distributed import ALONE
from normlab.train.evaluate import evaluate
from normlab.train.plan import Workload, evaluation_batch
from normlab.train.trainer import train
from tests.train.runs import config_of, numbers
from tests.train.test_tasks import config_of as config_of_task


def opened(text, **changes):
    config = config_of(text, **changes)
    data = config.task_object.open(config, progress=False)
    return config.for_data(data), data


@pytest.mark.parametrize(("eval_tokens", "batch"), [(400, 4), (511, 16), (512, 16), (1100, 16)])
def test_it_is_larger_where_the_validation_data_fill_it(text, eval_tokens, batch):
    """16 sequences of 32 tokens fill it; the last may be a part of one."""
    config, data = opened(text, eval_tokens=eval_tokens)
    samples = config.task_object.evaluation_samples(config, data)
    assert evaluation_batch(config, data) == (16 if samples >= 16 else 4) == batch


def test_the_size_of_a_batch_changes_no_result(text, monkeypatch):
    config, data = opened(text, eval_tokens=1100)
    torch.manual_seed(0)
    model = config.model.build().double()
    large = evaluate(model.cross_entropy, data, config, ALONE)
    monkeypatch.setattr(type(config.task_object), "evaluated_at_once", 1)
    assert evaluation_batch(config, data) == 4
    # Sums of the same 1,100 losses in another order, in double precision.
    assert large == {name: pytest.approx(value, rel=1e-12) for name, value in evaluate(
        model.cross_entropy, data, config, ALONE).items()}  # fmt: skip


def test_tasks_that_keep_their_logits_evaluate_as_they_train(text):
    config = config_of_task("masked", text, eval_tokens=2000)
    data = config.task_object.open(config, progress=False)
    assert evaluation_batch(config, data) == config.batch


def test_the_work_that_is_expected_includes_the_padding(text):
    config, data = opened(text, eval_tokens=1100)
    # 35 sequences in batches of 16.
    assert Workload.of(config, data).tokens_an_eval == 48 * 32


@pytest.mark.parametrize("task", ["language", "masked"])
@pytest.mark.parametrize(("eval_tokens", "held_out", "shape"), [
    (40, None, (4, 32)), (400, 100, (3, 32)), (400, 20, (1, 20)), (400, None, (4, 32)),
])  # fmt: skip
def test_what_is_profiled_holds_no_padding(task, eval_tokens, held_out, shape, text, tmp_path):
    """Filler behind a short text would be most of the tokens that a profile measures."""
    changes = {"eval_tokens": eval_tokens}
    if held_out is not None:
        # An end is one more token.
        (tmp_path / "val.txt").write_text(text.read_text()[: held_out - 1])
        changes["val_data"] = (str(tmp_path / "val.txt"),)
    config = config_of(text, **changes) if task == "language" else config_of_task(task, text, mask=1.0, **changes)
    data = config.task_object.open(config, progress=False)
    batch = config.task_object.few_samples(config, data, 4)
    assert batch.inputs.shape == shape
    # Of masked targets all but ends of documents.
    assert (batch.targets == IGNORED).sum() <= (task == "masked")


def test_a_run_is_profiled_on_the_same_windows_however_short_its_evaluations_are(text, tmp_path):
    def sensitivities(eval_tokens: int) -> list[float]:
        folder = tmp_path / str(eval_tokens)
        train(config_of(text, steps=2, eval_tokens=eval_tokens), folder, progress=False)
        return [record["sensitivity"] for record in numbers(folder) if record["kind"] == "profile"]

    short, long = map(sensitivities, (40, 400))
    assert short == long != []


def test_few_images_are_no_more_than_there_are(text):
    config = config_of_task("images", text)
    data = config.task_object.open(config, progress=False)
    few = dataclasses.replace(data, val=dataclasses.replace(data.val, chosen=data.val.chosen[:3]))
    assert [len(config.task_object.few_samples(config, part, 4).inputs) for part in (data, few)] == [4, 3]
