"""A run's configuration: checked when it is made, the same after a round trip, named by what decides the result."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normlab import DecoderConfig, EncoderConfig, NormLabError, TrainConfig, VisionConfig
from normlab.train import ImageTrainConfig, LanguageTrainConfig, MaskedTrainConfig


def text_of(tokens: int) -> SimpleNamespace:
    """All that a run asks of a text for its model."""
    return SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=tokens))


def test_round_trip_through_json():
    config = TrainConfig(model=DecoderConfig(scheme="peri(step=0.1)", depth=2), data=("a", "b"), clip=math.inf, lr=3e-4)
    again = TrainConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False)))
    assert again == config
    assert again.identity == config.identity


def test_steps_cover_the_tokens():
    config = TrainConfig(tokens=1000, length=64, batch=4)
    assert config.steps == math.ceil(1000 / 256)
    assert [config.rate(0), config.rate(config.steps - 1)] == [1.0, pytest.approx(config.final)]
    assert TrainConfig(tokens=1, length=64, batch=4).steps == 1


def test_warm_up_is_a_share_or_a_number_of_steps():
    def warmup_steps(warmup: float, steps: int) -> int:
        return TrainConfig(warmup=warmup, tokens=4096 * steps).warmup_steps

    assert [warmup_steps(share, 40) for share in (0, 0.05, 0.5, 1.0, 1)] == [0, 2, 20, 40, 40]
    assert [warmup_steps(7, steps) for steps in (7, 40, 400)] == [7, 7, 7]
    assert TrainConfig(warmup=7).identity == TrainConfig.from_dict(TrainConfig(warmup=7).to_dict()).identity


def test_identity_is_what_decides_the_result():
    config = TrainConfig(schedule="wsd", warmup=0)
    for change in ({"saves": 0}, {"keep": 5}, {"sinks": ("tensorboard",)}, {"branches": (1000,)}):
        assert dataclasses.replace(config, **change).identity == config.identity
    for change in ({"lr": 2e-3}, {"seed": 1}, {"tokens": 1000}, {"model": DecoderConfig(depth=5)}, {"data": ("x",)}):
        assert dataclasses.replace(config, **change).identity != config.identity
    # The vocabulary is the tokenizer's, which the configuration names.
    assert config.for_data(text_of(257)).identity == config.identity


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 10_000), (100_000, 10_000), (500_000, 50_000), (2_000_000, 200_000), (10**9, 200_000)]
)
@pytest.mark.parametrize("task", ["language", "masked"])
def test_the_size_of_an_evaluation_follows_the_budget(task, tokens, expected):
    config = TrainConfig(task=task, tokens=tokens)
    assert config.eval_tokens == expected
    # A number that is named or stored is kept, and with it the name of a stored run.
    stored = TrainConfig.from_dict(config.to_dict() | {"eval_tokens": 200_000})
    assert stored.eval_tokens == 200_000
    assert (stored.identity == config.identity) == (expected == 200_000)
    assert TrainConfig(task=task, tokens=tokens, eval_tokens=7).eval_tokens == 7


def test_the_vocabulary_is_padded_and_the_length_fits():
    config = TrainConfig(model=DecoderConfig(max_length=16), length=128)
    assert config.model.max_length == 128
    assert config.for_data(text_of(257)).model.vocab_size == 320
    assert config.for_data(text_of(50257)).model.vocab_size == 50304


def test_presets_take_fields_of_both():
    config = TrainConfig.preset("125m", scheme="geonorm", lr=6e-4, depth=6)
    assert (config.model.dim, config.model.depth, config.lr, config.length) == (768, 6, 6e-4, 1024)
    assert config.name.startswith("geonorm-lr0.0006-seed0-")
    with pytest.raises(NormLabError, match="unknown preset"):
        TrainConfig.preset("huge")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": math.nan}, "lr must be positive"),
        ({"lr": math.inf}, "lr must be finite, got inf; try 0.001"),
        ({"eps": math.inf}, "eps must be finite, got inf; try 1e-08"),
        ({"warmup": 1.5}, "warmup must lie in .*, or be a whole number of steps above 1, got 1.5; try 0.05 or 100"),
        ({"warmup": -0.1}, "warmup must lie in"),
        ({"warmup": math.nan}, "warmup must lie in"),
        ({"warmup": math.inf}, "warmup must lie in"),
        ({"warmup": 12, "tokens": 4096 * 11}, "warmup is 12 steps and the run has 11; lower warmup"),
        ({"batch": 3, "accumulate": 2}, "cannot be cut into 2 equal parts"),
        ({"weight_decay": -0.1}, "weight_decay must be a number from 0 on"),
        ({"betas": (0.9, 1.0)}, "betas must lie in"),
        ({"z_loss": -1.0}, "z_loss must be a number from 0 on"),
        ({"z_loss": math.nan}, "z_loss must be a number from 0 on"),
        ({"seed": 2**64}, "seed must lie in"),
        ({"seed": -1}, r"seed must lie in \[0, 2\*\*64\), got -1; try 0"),
        ({"data": ()}, "data is empty; name at least one source"),
        ({"evals": -1}, "evals must not be negative"),
        ({"schedule": "step"}, "unknown schedule 'step'"),
    ],
)
def test_mistakes_get_one_line(change, message):
    with pytest.raises(NormLabError, match=message):
        TrainConfig(**change)
    with pytest.raises(NormLabError, match="unknown field of a run 'learning_rate'"):
        TrainConfig.from_dict({"learning_rate": 1.0})


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def stored_rows() -> list[dict[str, Any]]:
    files = sorted(RESULTS.glob("2026-11-1[56]-*/rows.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def test_stored_runs_keep_their_names():
    rows = [row for row in stored_rows() if row["config"]["model"].get("tied", None) is None]
    assert len(rows) > 100
    assert {TrainConfig.from_dict(row["config"]).name for row in rows} == {row["run"] for row in rows}


def test_stored_runs_keep_their_heads():
    """Version 0.1 wrote `tied: null` for a tied head, unless the scheme needs one of its own."""
    stored = TrainConfig().model.to_dict() | {"tied": None}
    assert TrainConfig.from_dict({"model": stored}).model.tied_head
    assert not TrainConfig.from_dict({"model": stored | {"scheme": "ngpt"}}).model.tied_head
    assert not TrainConfig().model.tied_head


# One run of each task with fields of that task set, and the names that commit bb4c94d gave them.
PINNED: list[tuple[str, dict[str, Any]]] = [
    (
        "peri-step-0.1-lr0.001-seed3-52fdae02",
        {
            "task": "language", "data": ["a.txt", "b"], "val_fraction": 0.05, "tokenizer": "bpe:300",
            "boundaries": "respected", "tokens": 12345, "length": 32, "eval_tokens": 777, "clip": None, "seed": 3,
            "continued": [9], "model": {"scheme": "peri(step=0.1)", "depth": 2, "dim": 64, "heads": 2},
        },
    ),
    (
        "post-lr0.0003-seed0-832504a4",
        {
            "task": "masked", "tokenizer": "bpe:300", "boundaries": "respected", "tokens": 54321, "length": 48,
            "mask": 0.3, "lr": 3e-4, "stop_hopeless": True, "model": {"scheme": "post", "depth": 3},
        },
    ),
    (
        "geonorm-lr0.001-seed0-e058066a",
        {
            "task": "images", "data": ["photographs"], "images": 4096, "shift": 2, "flip": True, "batch": 64,
            "trouble": "none", "model": {"scheme": "geonorm", "image_size": 16, "patch": 4, "channels": 3},
        },
    ),
    ("pre-lr0.001-seed0-0cc70f12", {"task": "language"}),
    ("pre-lr0.001-seed0-239c72d9", {"task": "masked"}),
    ("pre-lr0.001-seed0-f9f1e349", {"task": "images"}),
]  # fmt: skip

SHARED = {
    "task", "model", "data", "val_data", "val_fraction", "batch", "accumulate", "optimiser", "lr", "weight_decay",
    "betas", "eps", "clip", "z_loss", "schedule", "warmup", "final", "decay", "base_dim", "seed", "device", "precision",
    "compile", "evals", "saves", "keep", "trouble", "spike", "stop_hopeless", "sinks",
}  # fmt: skip
OF_TEXT = {"tokenizer", "boundaries", "tokens", "length", "eval_tokens"}
OF_TASK = {"language": OF_TEXT, "masked": OF_TEXT | {"mask"}, "images": {"images", "shift", "flip"}}


@pytest.mark.parametrize(("name", "fields"), PINNED, ids=[name for name, _ in PINNED])
def test_names_and_stored_layout_of_every_task_are_pinned(name, fields):
    config = TrainConfig.from_dict(fields)
    assert config.name == name
    written = config.to_dict()
    assert written.keys() == SHARED | OF_TASK[fields["task"]] | ({"continued"} & fields.keys())
    assert {key: written[key] for key in fields if key != "model"} == {k: fields[k] for k in fields if k != "model"}
    assert TrainConfig.from_dict(json.loads(json.dumps(written, allow_nan=False))) == config


def test_in_python_the_names_are_the_same():
    models = {"language": DecoderConfig, "masked": EncoderConfig, "images": VisionConfig}
    for name, fields in PINNED:
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
        given["model"] = models[fields["task"]](**fields.get("model", {}))
        given["clip"] = math.inf if "clip" in fields else 1.0
        assert TrainConfig(**given).name == name


def test_a_configuration_is_of_the_class_of_its_task():
    assert [type(TrainConfig.from_dict({"task": task})) for task in OF_TASK] == [
        LanguageTrainConfig, MaskedTrainConfig, ImageTrainConfig,
    ]  # fmt: skip
    assert TrainConfig(task="images", shift=1) == ImageTrainConfig(shift=1)
    assert TrainConfig() == LanguageTrainConfig()
    assert MaskedTrainConfig.preset("125m") == TrainConfig.preset("125m", task="masked")
    images = ImageTrainConfig(flip=True)
    assert pickle.loads(pickle.dumps(images)) == dataclasses.replace(images) == images
    with pytest.raises(NormLabError, match="ImageTrainConfig has the task 'images', got 'masked'"):
        ImageTrainConfig(task="masked")
    with pytest.raises(NormLabError, match="task images has no tokens; leave it out, or try task language or masked"):
        dataclasses.replace(images, tokens=5)
    with pytest.raises(TypeError, match="learning_rate"):
        TrainConfig(learning_rate=1.0)
