"""A watch on other people's loops: looks when they are due, writes what it sees, names what breaks, leaves no trace."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from normlab import NormLabError
from normlab.checks.callbacks import Watch
from normlab.checks.hf_callback import HFCallback
from normlab.probes.profile import Profile
from tests.matrix import parametrize
from tests.probes.loops import Tower, decoder, hooks_on, text
from tests.targets.tiny import batch_for, hugging_face


def records(path: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def train(model: nn.Module, steps: int, watch: Watch | None = None, *, hurt=lambda step: None, lr: float = 1e-3):
    """A plain loop; `hurt(step)` does something to the model before its step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        hurt(step)
        if watch is None:
            loss = model.loss(*text(seed=step))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            continue
        with watch.step() as look:
            loss = model.loss(*text(seed=step))
            look.record(loss=loss)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return [p.detach().clone() for p in model.parameters()]


def test_looks_are_taken_when_they_are_due_and_written(tmp_path):
    model = decoder()
    watch = Watch(model, every=3, out=tmp_path / "profiles.jsonl")
    train(model, 8, watch)
    found = records(tmp_path / "profiles.jsonl", "profile")
    assert [line["step"] for line in found] == [0, 3, 6]
    assert {line["stack"] for line in found} == {"stack.layers"}
    profiles = [Profile.from_dict(line["profile"]) for line in found]
    assert profiles[-1] == watch.profiles["stack.layers"]
    assert all(None not in profile.upd_ratio + profile.grad_h for profile in profiles)
    assert watch.broken is None
    assert not records(tmp_path / "profiles.jsonl", "event")
    assert {verdict.name for verdict in watch.verdicts["stack.layers"]} >= {"collapse", "uneven", "unsteady"}


def test_a_watch_changes_nothing_and_leaves_no_hook():
    plain, watched = decoder(), decoder()
    watch = Watch(watched, every=2)
    for one, other in zip(train(plain, 5), train(watched, 5, watch), strict=True):
        assert torch.equal(one, other)
    assert hooks_on(watched) == 0


@pytest.mark.parametrize("every", [1, 50])
def test_a_nan_at_step_seven_is_named_whether_or_not_its_step_was_due(tmp_path, every, caplog):
    model = decoder()
    down = model.stack.layers[1].branches[1].down
    handles = []

    def hurt(step: int) -> None:
        if step == 7:
            handles.append(down.register_forward_hook(lambda _m, _a, output: output * math.nan))

    watch = Watch(model, every=every, out=tmp_path / "profiles.jsonl")
    with caplog.at_level(logging.WARNING, "normlab.checks"):
        train(model, 12, watch, hurt=hurt)
    # A step that was due knows the module, any other one the block.
    where = "stack.layers.1.branches.1.down" if every == 1 else "stack.layers.1"
    assert watch.broken == (7, where)
    (event,) = records(tmp_path / "profiles.jsonl", "event")
    assert (event["step"], event["what"], event["layer"]) == (7, "nonfinite", where)
    assert f"{where} is the first that was not finite, at step 7" in caplog.text
    # The alarm made the next step be looked at.
    looked_at = [line["step"] for line in records(tmp_path / "profiles.jsonl", "profile")]
    assert looked_at == (list(range(12)) if every == 1 else [0, 8])


@pytest.mark.parametrize("broken", [3, 7])
def test_a_nan_right_before_a_look_or_the_end_keeps_its_step(broken):
    model = decoder()
    watch = Watch(model, every=4)

    def hurt(step: int) -> None:
        if step == broken:
            with torch.no_grad():
                model.stack.layers[2].branches[1].down.weight[0, 0] = math.nan

    train(model, 8, watch, hurt=hurt)
    watch.close()
    assert watch.broken == (broken, "stack.layers.2")


def test_a_loss_that_breaks_behind_the_blocks_is_heard():
    model = hugging_face("gpt2")
    watch = Watch(model, every=50)
    for step in range(4):
        with watch.step(step):
            if step == 2:
                model.lm_head.weight.data.fill_(math.nan)
            model(**batch_for("gpt2")).loss.backward()
    assert watch.broken is not None
    assert watch.broken.step == 2


def test_a_verdict_is_logged_when_it_is_new(tmp_path, caplog):
    model = decoder(depth=6)

    def hurt(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model.stack.layers[3].branches[1].down.weight.mul_(50.0)

    watch = Watch(model, every=2, out=tmp_path / "profiles.jsonl")
    with caplog.at_level(logging.WARNING, "normlab.checks"):
        train(model, 7, watch, hurt=hurt)
    found = [line for line in records(tmp_path / "profiles.jsonl", "verdict") if line["verdict"]["name"] == "uneven"]
    assert [line["step"] for line in found] == [2]
    assert found[0]["verdict"]["layers"] == [3]
    assert caplog.text.count("uneven") == 1


def test_a_resumed_loop_keeps_its_count():
    model = decoder()
    watch = Watch(model, every=10)
    for step in (25, 30, 31, 40):
        with watch.step(step):
            model.loss(*text()).backward()
    assert watch.profiles["stack.layers"].step == 40
    with watch.step():
        model.loss(*text()).backward()
    assert watch.profiles["stack.layers"].step == 40


@pytest.mark.parametrize("step", [0, 1])
def test_a_step_that_raises_keeps_its_error_and_loses_its_hooks(step):
    model = decoder()
    watch = Watch(model, every=50)
    with pytest.raises(ZeroDivisionError), watch.step(step):
        model.loss(*text()).backward(gradient=torch.tensor(1 / 0))
    assert hooks_on(model) == 0
    watch.begin(step)
    model.loss(*text())
    # The loop never came to the end of that step.
    with watch.step(50):
        model.loss(*text()).backward()
    assert hooks_on(model) == 0
    assert watch.profiles["stack.layers"].step == 50


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(NormLabError, match="every must be a whole number from 1 on"):
        Watch(decoder(), every=0)
    with pytest.raises(NormLabError, match="no repeated blocks"):
        Watch(nn.Linear(2, 2))
    (tmp_path / "gone").mkdir()
    watch = Watch(decoder(), out=tmp_path / "gone" / "profiles.jsonl")
    (tmp_path / "gone").rmdir()
    with pytest.raises(NormLabError, match="cannot write"), watch.step():
        watch.model.loss(*text()).backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_models_stay_compiled_between_looks(in_place, no_default_device):
    torch.manual_seed(1)
    torch.compiler.reset()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    tower = Tower()
    model = tower if in_place else torch.compile(tower, backend=backend)
    if in_place:
        tower.compile(backend=backend)
    watch = Watch(model, every=4)
    x = torch.randn(2, 5, 8)
    counts = []
    for step in range(8):
        with watch.step(step) as look:
            loss = model(x) * (math.nan if step == 6 else 1.0)
            look.record(loss=loss)
            loss.backward()
        counts.append(len(graphs))
    # Compiled once, by the first step that was not looked at, and whole.
    assert counts == [0, 1, 1, 1, 1, 1, 1, 1]
    assert watch.broken == (6, "the loss")
    torch.compiler.reset()


# -- Hugging Face's Trainer ------------------------------------------------------------------------------------------


def trainer(model: nn.Module, folder: Path, callback: HFCallback | None, **options):
    import transformers

    rows = [{name: value[0] for name, value in batch_for("gpt2", batch=1, seed=seed).items()} for seed in range(64)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=9, per_device_train_batch_size=2, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    callbacks = [] if callback is None else [callback]
    return transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks)  # type: ignore


@parametrize("accumulate", [1, 3], quick=[3])
def test_the_trainer_is_watched_and_not_changed(tmp_path, accumulate):
    plain, watched = hugging_face("gpt2").train(), hugging_face("gpt2").train()
    trainer(plain, tmp_path, None, gradient_accumulation_steps=accumulate).train()
    callback = HFCallback(every=4, out=tmp_path / "profiles.jsonl")
    trainer(watched, tmp_path, callback, gradient_accumulation_steps=accumulate).train()
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    found = records(tmp_path / "profiles.jsonl", "profile")
    assert [line["step"] for line in found] == [0, 4, 8]
    last = Profile.from_dict(found[-1]["profile"])
    assert None not in last.rms + last.grad_h + last.grad_w + last.upd_ratio + last.attn_entropy
    assert last.loss is not None
    assert hooks_on(watched) == 0


@parametrize("step", [7, 8], quick=[7])
def test_the_trainer_goes_on_after_a_nan_that_is_named(tmp_path, step):
    model = hugging_face("gpt2").train()
    projection, calls = model.transformer.h[2].mlp.c_proj, []

    def spoil(_module, _args, output):
        calls.append(1)
        return output * math.nan if len(calls) == step + 1 else output

    projection.register_forward_hook(spoil)
    callback = HFCallback(every=50, out=tmp_path / "profiles.jsonl")
    trainer(model, tmp_path, callback).train()
    assert callback.watch is not None
    assert callback.watch.broken == (step, "transformer.h.2")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("scheme", ["pre", "geonorm"])  # without and with an entry
def test_models_compiled_by_layers_stay_compiled_between_looks(scheme, no_default_device):
    torch.compiler.reset()
    calls = []

    def backend(graph, _inputs):
        return lambda *given: calls.append(graph) or graph.forward(*given)

    model = decoder(scheme=scheme).compile_parts(backend=backend, dynamic=False)
    watch, counts, batch = Watch(model, every=4), [], text()
    for step in range(4):
        calls.clear()
        with watch.step(step) as look:
            loss = model.loss(*batch) * (math.nan if step == 2 else 1.0)
            look.record(loss=loss)
            loss.backward()
        counts.append(len(calls))
    # A step that is not looked at runs compiled code alone: all blocks, the head, and the entry if there is one.
    assert counts[0] == 0
    assert counts[1:3] == [len(model.stack.layers) + 1 + (scheme == "geonorm")] * 2
    assert watch.broken == (2, "the loss")
    torch.compiler.reset()


@pytest.mark.parametrize("every", [0, 1.5, "50"])
def test_a_watch_takes_a_whole_number_of_steps(every):
    with pytest.raises(NormLabError, match="every must be a whole number from 1 on"):
        Watch(decoder(), every=every)


def test_a_file_that_cannot_be_written_is_refused_before_the_loop(tmp_path):
    with pytest.raises(NormLabError, match="missing is not a folder"):
        Watch(decoder(), out=tmp_path / "missing" / "profiles.jsonl")
    with pytest.raises(NormLabError, match="is a folder; expected a file"):
        Watch(decoder(), out=tmp_path)
