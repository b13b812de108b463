"""Comparisons of encoders and vision Transformers: the same plan, with accuracy in place of loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normlab import EncoderConfig, NormLabError, TrainConfig, VisionConfig
from normlab.compare import CompareConfig, compare
from normlab.compare.report import build, markdown
from normlab.compare.report.results import load_results
from normlab.compare.statistics import find_winner, rank_schemes
from tests.compare import small

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

SHAPE = {"depth": 1, "dim": 16, "heads": 2}
RUN = {"batch": 16, "evals": 2, "saves": 0, "device": "cpu"}


def config_of(task: str, text: Path) -> CompareConfig:
    if task == "images":
        # Enough for both schemes to do better than guessing the most frequent digit: else they are stuck.
        base = TrainConfig(task="images", model=VisionConfig(**SHAPE), images=160 * 16, **RUN)
    else:
        data = {"data": (str(text),), "val_data": (str(small.held_out(text)),)}
        of_text = {**data, "length": 32, "tokens": 12 * 16 * 32, "eval_tokens": 600}
        base = TrainConfig(task="masked", model=EncoderConfig(**SHAPE), **of_text, **RUN)
    return CompareConfig(base=base, schemes=("pre", "peri"), lrs=(5e-3, 1e-2), seeds=2, workers=1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "metric", "field", "beside"),
    [("images", "val_accuracy", "accuracy", "loss"), ("masked", "val_masked_loss", "loss", "accuracy")],
)
def test_a_comparison_of_another_task(task, metric, field, beside, text, tmp_path):
    config = config_of(task, text)
    standings = compare(config, tmp_path, progress=False)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert {row["metric"] for row in rows} == {metric}
    assert all(row["value"] == row[field] and row[beside] is not None for row in rows)
    means = [own.mean for own in standings]
    assert means == sorted(means, reverse=task == "images")
    for own in standings:
        tuned = {row["lr"]: row["value"] for row in rows if row["scheme"] == own.scheme and row["role"] == "tune"}
        best = max if task == "images" else min
        assert tuned[own.lr] == best(tuned.values())
    # Nothing is left to do, and the page is there.
    assert compare(config, tmp_path, progress=False) == standings
    text_of_page = build(tmp_path).read_text(encoding="utf-8")
    table = markdown(tmp_path)
    for found in (text_of_page, table):
        assert ("Higher is better" if task == "images" else "Lower is better") in found
        assert ("validation accuracy" if task == "images" else "masked tokens") in found
    assert load_results(tmp_path).metric.name == metric


@pytest.mark.full
def test_another_task_is_another_comparison(text, tmp_path):
    compare(config_of("masked", text), tmp_path, progress=False)
    with pytest.raises(NormLabError, match="holds another comparison: its"):
        compare(config_of("images", text), tmp_path, progress=False)


@pytest.mark.full
def test_comparisons_that_were_made_before_there_were_tasks(text, tmp_path):
    config = small.configuration(text, lrs=(1e-2,), seeds=1)
    compare(config, tmp_path, progress=False)
    before = (tmp_path / "rows.jsonl").read_text()
    about = json.loads((tmp_path / "compare.json").read_text())
    del about["base"]["task"]
    (tmp_path / "compare.json").write_text(json.dumps(about))
    assert len(compare(config, tmp_path, progress=False)) == 2
    assert (tmp_path / "rows.jsonl").read_text() == before


def rows_of(values: dict[str, dict[float, dict[int, float]]], metric: str, sign: float) -> list[dict]:
    return [
        {
            "scheme": scheme, "lr": lr, "seed": seed, "role": "tune" if seed >= 1000 else "judge", "state": "done",
            "value": sign * value, "metric": metric,
        }
        for scheme, rates in values.items() for lr, seeds in rates.items() for seed, value in seeds.items()
    ]  # fmt: skip


def test_what_is_better_upwards_is_the_mirror_of_what_is_better_downwards():
    judged = {"pre": 0.50, "post": 0.61, "peri": 0.42, "geonorm": 0.495}
    values = {
        scheme: {1e-3: {1000: 0.7} | {s: mean * (1 + 0.002 * (s * 7 % 3)) for s in range(5)}, 1e-2: {1000: 0.9}}
        for scheme, mean in judged.items()
    }
    down = rank_schemes(rows_of(values, "val_loss", 1.0), "pre")
    up = rank_schemes(rows_of(values, "val_accuracy", -1.0), "pre")
    assert [own.scheme for own in up] == [own.scheme for own in down] == ["peri", "geonorm", "pre", "post"]
    assert [own.verdict for own in up] == [own.verdict for own in down]
    assert [own.verdict for own in up][-1] == "worse"
    assert [own.lr for own in up] == [own.lr for own in down]
    assert find_winner(up).scheme == find_winner(down).scheme == "peri"
    for mine, theirs in zip(up, down, strict=True):
        if mine.difference is not None:
            assert (mine.difference.low, mine.difference.high) == (-theirs.difference.high, -theirs.difference.low)
    plain = rank_schemes(rows_of(values, "val_accuracy", 1.0), "pre")
    # The same numbers the other way: the rate that looked worse is the one to pick.
    assert {own.lr for own in down} == {1e-3}
    assert {own.lr for own in plain} == {1e-2}
