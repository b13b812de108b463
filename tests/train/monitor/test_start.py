"""The loss before the first step: what random logits cost, a tied head that echoes, and the line about it."""

from __future__ import annotations

import math

import pytest
import torch

from normlab import DecoderConfig, EncoderConfig
from normlab.data import Batch
from normlab.probes.start import Start
from normlab.train.monitor.start import MARGIN, measure_start, warning
from normlab.train.tasks import find_task
from normlab.train.trainer import train
from tests.train.runs import config_of, events

VOCABULARY = 320
# With outputs that start at zero the state at the exit is the embedding, normalised.
SIZE = {"scheme": "pre", "depth": 1, "dim": 64, "heads": 4, "zero_outputs": True}
ECHO = {**SIZE, "init_std": 0.5, "tied": True}


def tokens() -> Batch:
    made = torch.randint(0, VOCABULARY, (4, 257), generator=torch.Generator().manual_seed(1))
    return Batch(made[:, :-1], made[:, 1:])


def known(loss: float, answers: int, random: float, echo: float | None, tied: bool) -> Start:
    read = math.nan if echo is None else echo
    sizes = {"name": "", "width": 768, "vocabulary": answers, "guess": math.log(answers)}
    return Start(**sizes, tied=tied, loss=loss, random=random, read=read)


def start_of(**changes) -> Start:
    model = DecoderConfig(**SIZE, vocab_size=VOCABULARY, **changes).build()
    return measure_start(model, find_task("language"), tokens())


@pytest.mark.parametrize("std", [0.01, 0.05, 0.125])
def test_random_logits_cost_half_their_variance(std):
    found = start_of(init_std=std, tied=False)
    variance = SIZE["dim"] * std**2
    # The mean square of 64 · 320 normal entries strays by √(2 / 20480), 1 %: five deviations.
    assert found.random == pytest.approx(variance / 2, rel=0.05)
    # The mean over 1,024 targets of logits of that variance: five deviations, and what 320 answers leave of the sum.
    tolerance = 5 * math.sqrt(variance / 1024) + math.expm1(variance) / VOCABULARY
    assert found.loss == pytest.approx(math.log(VOCABULARY) + variance / 2, abs=tolerance)
    assert not found.is_far_above(MARGIN)


def test_a_tied_head_gives_the_token_read_a_logit_of_width_times_std():
    found, chance = start_of(init_std=0.125, tied=True), SIZE["dim"] * 0.125
    # exp(8) beside 320 logits of variance one: a probability of 0.85; lengths of 64 entries stray by 9 %.
    read = math.exp(chance) / (math.exp(chance) + VOCABULARY * math.exp(0.5))
    assert found.read == pytest.approx(read, abs=0.05)
    assert found.is_far_above(MARGIN)
    assert start_of(init_std=0.125, tied=False).read == pytest.approx(1 / VOCABULARY, rel=0.5)


def test_the_echo_is_the_mean_probability_of_the_token_read():
    model = DecoderConfig(scheme="post", depth=2, dim=32, heads=4, vocab_size=VOCABULARY, tied=True).build()
    inputs = tokens().inputs[:1]
    expected = model(inputs).softmax(-1).gather(-1, inputs[..., None]).mean().item()
    assert find_task("language").echo(model, tokens()) == pytest.approx(expected, rel=1e-5)


def test_only_the_next_token_can_be_an_echo():
    model = EncoderConfig(scheme="pre", depth=1, dim=32, heads=4, vocab_size=VOCABULARY).build()
    assert math.isnan(measure_start(model, find_task("masked"), tokens()).read)


def test_nothing_of_it_remains():
    model = DecoderConfig(**SIZE, vocab_size=VOCABULARY).build()
    before = torch.get_rng_state()
    measure_start(model, find_task("language"), tokens())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_it_says_what_to_try_in_one_line(text, tmp_path, capfd):
    result = train(config_of(text, steps=1, model=ECHO), tmp_path, progress=True)
    (event,) = events(tmp_path, "start")
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("the first loss")]
    assert said == [event["detail"]]
    assert said[0].startswith(f"the first loss, {result.first_loss:.2f}, is far above that of chance (ln 320 = 5.77, ")
    assert "the mean probability of the token just read is 1.00" in said[0]
    assert said[0].endswith("try a head of its own: --tied False")


def test_a_head_of_its_own_starts_as_chance_does(text, tmp_path):
    # At this std a tied head gives the token just read 0.85.
    result = train(config_of(text, steps=1, model={**ECHO, "init_std": 0.125, "tied": False}), tmp_path, progress=False)
    assert events(tmp_path, "start") == []
    assert result.first_loss < math.log(VOCABULARY) + SIZE["dim"] * 0.125**2 / 2 + 0.5


def test_a_head_of_its_own_may_start_too_large(text, tmp_path):
    """Random logits of variance 64 · 0.5² add 8 nats, more than a guess costs."""
    result = train(config_of(text, steps=1, model={**ECHO, "tied": False}), tmp_path, progress=False)
    assert result.first_loss > 2 * math.log(VOCABULARY) + MARGIN
    (event,) = events(tmp_path, "start")
    assert "the logits start too large; try a smaller --init-std" in event["detail"]


@pytest.mark.parametrize(
    ("echo", "tied", "advice"),
    [
        (None, False, "the logits start too large; try a smaller --init-std, or a scheme that ends in a norm"),
        (0.01, True, "the logits start too large; try a smaller --init-std, or a scheme that ends in a norm"),
        (0.9, False, "the mean probability of the token just read is 0.90; try a smaller --init-std"),
    ],
)
def test_what_to_try_follows_from_what_is_wrong(echo, tied, advice):
    found = known(loss=20.0, answers=32768, random=0.15, echo=echo, tied=tied)
    assert warning(found) == (
        f"the first loss, 20.00, is far above that of chance (ln 32768 = 10.40, and random logits add 0.15): {advice}"
    )


@pytest.mark.parametrize(("loss", "far"), [(11.04, False), (11.06, True), (math.nan, False), (math.inf, True)])
def test_the_threshold(loss, far):
    # ln 32768 + ½ · 768 · 0.02² + ½ = 11.0508
    found = known(loss=loss, answers=32768, random=768 * 0.02**2 / 2, echo=None, tied=False)
    assert found.is_far_above(MARGIN) is far


def test_a_first_loss_that_is_not_finite_is_not_known(text, tmp_path, monkeypatch):
    monkeypatch.setattr("normlab.train.monitor.start.measure_start", lambda *_: known(math.inf, 320, 0.1, None, False))
    result = train(config_of(text, steps=1), tmp_path, progress=False)
    assert result.first_loss is None
    assert len(events(tmp_path, "start")) == 1
