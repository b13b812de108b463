"""Many states measured at once, as on a GPU, are measured alike; a look on its way is heard in its turn."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from normlab.checks.callbacks import Watch
from normlab.probes import batched, ledger
from normlab.probes.attention import summarise
from normlab.probes.batched import Together
from normlab.probes.measures import block, boundary_with_channels, boundary_with_ranks
from normlab.probes.probe import measure_stacks
from normlab.utils.host_copy import HostCopy
from tests.probes.loops import decoder, same, text
from tests.targets.tiny import batch_for, hugging_face

EPS = torch.finfo(torch.float32).eps


@pytest.fixture
def gathering(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(batched, "gathers", lambda device: True)


def states(dtype: torch.dtype, count: int = 5) -> list[torch.Tensor]:
    """Ordinary, zero, huge and tiny ones, and one with entries that are not finite."""
    generator = torch.Generator().manual_seed(3)
    found = [torch.randn(3, 7, 16, generator=generator) for _ in range(count)]
    found[1] = torch.zeros(3, 7, 16)
    found[2] *= 3e4 if dtype == torch.float16 else 1e30
    found[3] *= 1e-6
    found[4][1, 2, 3], found[4][2, 0, 0] = math.nan, -math.inf
    return [h.to(dtype) for h in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", [boundary_with_ranks, boundary_with_channels])
def test_states_measured_together_are_measured_alike(dtype, function, gathering):
    answers: list[dict[str, torch.Tensor]] = []
    calls = Together(function)
    for h in states(dtype):
        calls.ask(answers.append, h)
    assert not answers
    calls.finish()
    for h, answer in zip(states(dtype), answers, strict=True):
        for name, value in function(h).items():
            # Sums over 16 to 336 entries in another order.
            torch.testing.assert_close(answer[name], value, rtol=400 * EPS, atol=400 * EPS, equal_nan=True, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_measured_together_are_measured_alike(dtype, gathering):
    answers: list[dict[str, torch.Tensor]] = []
    calls, before = Together(block), states(dtype)
    after = [h + h.roll(1, 0) / 4 for h in before]
    for pair in zip(before, after, strict=True):
        calls.ask(answers.append, *pair)
    calls.finish()
    for pair, answer in zip(zip(before, after, strict=True), answers, strict=True):
        for name, value in block(*pair).items():
            torch.testing.assert_close(answer[name], value, rtol=400 * EPS, atol=400 * EPS, equal_nan=True, msg=name)


def test_rows_of_attention_summarised_together_are_summarised_alike(gathering):
    answers: list[dict[str, torch.Tensor]] = []
    calls, visible = Together(summarise), torch.ones(2, 3, 4, 9).tril(3).bool()
    scores = [3 * torch.randn(2, 3, 4, 9) for _ in range(3)]
    for one in scores:
        calls.ask(answers.append, one, visible)
    calls.finish()
    for one, answer in zip(scores, answers, strict=True):
        for name, value in summarise(one, visible).items():
            torch.testing.assert_close(answer[name], value, rtol=100 * EPS, atol=100 * EPS, msg=name)


def test_calls_are_answered_when_there_is_no_more_room(gathering, monkeypatch):
    monkeypatch.setattr(batched, "ROOM", 3 * 4 * 5)
    heard: list[int] = []
    calls = Together(lambda h: {"sum": h.sum()})
    for number in range(4):
        calls.ask(lambda answer: heard.append(int(answer["sum"])), torch.full((4, 5), float(number)))
        # Others wait on their own.
        calls.ask(lambda answer: heard.append(-1), torch.ones(1, 5))
    assert heard == [0, 20, 40]
    calls.finish()
    assert sorted(heard) == [-1, -1, -1, -1, 0, 20, 40, 60]


def test_what_waits_cannot_be_written_to(gathering):
    state = torch.ones(2, 3, 4)
    kept = batched.kept(state[:1], state)
    state.zero_()
    assert kept.sum() == 12


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "t5"])
def test_profiles_are_the_same_for_models_of_others(name, monkeypatch):
    model, batch = hugging_face(name), batch_for(name)
    alone = measure_stacks(model, batch)
    monkeypatch.setattr(batched, "gathers", lambda device: True)
    gathered = measure_stacks(model, batch)
    assert alone.keys() == gathered.keys()
    for stack in alone:
        same(gathered[stack], alone[stack], tolerance=1e-4)


# -- a look on its way -------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """Numbers come from the device when the gate is opened."""
    gate = threading.Event()

    class Slow(HostCopy):
        @property
        def is_there(self) -> bool:
            return gate.is_set()

        def wait(self) -> torch.Tensor:
            assert gate.wait(60)
            return super().wait()

    monkeypatch.setattr(ledger, "HostCopy", Slow)
    return gate


def loop(model, watch: Watch, steps: range, broken: int | None = None) -> None:
    for step in steps:
        if step == broken:
            with torch.no_grad():
                model.stack.layers[1].branches[1].down.weight[0, 0] = math.nan
        with watch.step(step):
            model.loss(*text(seed=step)).backward()


def test_a_loop_does_not_wait_for_a_look(gate, tmp_path):
    model, out = decoder(), tmp_path / "profiles.jsonl"
    watch = Watch(model, every=10, out=out)
    loop(model, watch, range(5))
    assert not out.exists()
    gate.set()
    assert watch.profiles["stack.layers"].step == 0
    assert out.read_text().count('"profile"') == 2  # kind and key of one line
    assert watch.verdicts["stack.layers"]


def test_the_end_of_a_loop_hears_the_last_look(gate, tmp_path):
    model, out = decoder(), tmp_path / "profiles.jsonl"
    watch = Watch(model, out=out)
    loop(model, watch, range(2))
    gate.set()
    watch.close()
    assert out.exists()


@pytest.mark.parametrize(("broken", "where"), [(3, "stack.layers.1"), (4, "stack.layers.1.branches.1.down")])
def test_what_broke_first_is_named_first_whoever_hears_of_it(gate, broken, where):
    model = decoder()
    watch = Watch(model, every=4)
    gate.set()
    loop(model, watch, range(3))
    watch.close()
    gate.clear()
    loop(model, watch, range(3, 7), broken)
    assert watch.broken is None
    gate.set()
    watch.close()
    assert watch.broken == (broken, where)
