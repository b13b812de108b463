"""A configuration that refuses a number says in one line what to try, and takes what it advises."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import normlab
from normlab.checks.config import CheckConfig
from normlab.dynamics.config import SimulateConfig
from normlab.errors import NormLabError
from normlab.evaluation.config import EvaluationConfig
from normlab.ladders import LadderConfig

Make = Callable[..., Any]


def evaluation(**options: Any) -> EvaluationConfig:
    return EvaluationConfig(runs=("run",), bits=("book.txt",), **options)


def ladder(**options: Any) -> LadderConfig:
    return LadderConfig(base=normlab.TrainConfig(length=32), sizes=("2x64", "4x64"), budgets=(1_000_000,), **options)


REFUSED: list[tuple[Make, dict[str, Any]]] = [
    *((normlab.TrainConfig, {name: 0}) for name in ("batch", "accumulate", "keep", "tokens", "length", "eval_tokens")),
    *((normlab.TrainConfig, {name: 0.0}) for name in ("lr", "eps", "clip", "spike")),
    *((normlab.TrainConfig, {name: -1}) for name in ("evals", "saves", "weight_decay", "z_loss")),
    *((normlab.DecoderConfig, {name: 0}) for name in ("depth", "dim", "heads", "vocab_size", "max_length")),
    *((SimulateConfig, {name: -1}) for name in ("tokens", "dim", "seeds", "depth", "cut", "heads", "mlp", "bins")),
    *((SimulateConfig, {name: -1.0}) for name in ("time", "step", "tolerance", "radius", "angle", "beta")),
    *(
        (CheckConfig, {name: 0})
        for name in ("steps", "seeds", "length", "batch_size", "width", "shrink", "max_seconds")
    ),
    *((evaluation, {name: 0}) for name in ("length", "stride", "limit", "batch")),
    *((ladder, {name: 0}) for name in ("seeds", "head_width", "warmup_steps", "tokens_per_parameter", "epochs")),
]


@pytest.mark.parametrize(("make", "wrong"), REFUSED, ids=[f"{make.__name__}-{min(wrong)}" for make, wrong in REFUSED])
def test_a_refused_number_comes_with_one_that_is_taken(make: Make, wrong: dict[str, Any]) -> None:
    with pytest.raises(NormLabError) as error:
        make(**wrong)
    message = str(error.value)
    assert "\n" not in message
    (name,) = wrong
    if message.endswith("; leave it out"):
        make()
        return
    advised = re.search(r"; try ([\d.e-]+)$", message)
    assert advised is not None, message
    make(**{name: type(wrong[name])(float(advised[1]))})
