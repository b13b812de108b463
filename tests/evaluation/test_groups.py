"""Standard errors over groups of questions: the textbook's, and the plain ones where every group is one question."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from rich.console import Console

from normlab.evaluation.groups import group_scores, grouped_mean
from normlab.evaluation.harness import _with_groups
from normlab.evaluation.score import Score
from normlab.evaluation.terminal import print_rows


def test_groups_of_one_question_give_the_plain_error():
    values = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    found = grouped_mean(group_scores((str(place), value) for place, value in enumerate(values)))
    assert found.mean == pytest.approx(np.mean(values))
    assert found.stderr == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)))


def test_groups_of_equal_size_are_as_many_means():
    means = {"a": (0.25, 8), "b": (0.5, 8), "c": (0.75, 8)}
    assert grouped_mean(means) == pytest.approx((0.5, 0.25 / math.sqrt(3), 3))


def test_the_error_covers_groups_that_differ():
    """Groups of unequal size with chances of their own: the spread of the mean over repetitions is what is stated."""
    chance, sizes, means, plain, stated = np.random.default_rng(0), np.array([10, 20, 30, 40] * 5), [], [], []
    for _ in range(2000):
        right = chance.binomial(sizes, np.clip(chance.normal(0.5, 0.15, len(sizes)), 0.0, 1.0)) / sizes
        found = grouped_mean(
            {str(k): (float(mean), int(size)) for k, (mean, size) in enumerate(zip(right, sizes, strict=True))}
        )
        assert found.stderr is not None
        means.append(found.mean)
        stated.append(found.stderr**2)
        plain.append(found.mean * (1 - found.mean) / sizes.sum())
    # 2000 repetitions know a variance to √(2/2000) = 3 %; a ratio over 20 groups is a few per cent too small.
    assert np.mean(stated) == pytest.approx(np.var(means), rel=0.15)
    assert np.mean(plain) < 0.6 * np.var(means)


def test_one_group_has_no_error():
    assert grouped_mean({"a": (0.5, 8)}).stderr is None


def found(values: list[float], value: float) -> Score:
    samples = [{"doc": {"book": "ab"[k % 2]}, "filter": "none", "acc": one} for k, one in enumerate(values)]
    score = Score(task="t", metric="acc", value=value, stderr=0.1, samples=len(values))
    return _with_groups(score, {"samples": {"t": samples}}, {"t": "book"})


def test_a_metric_that_is_a_mean_of_questions_gets_its_groups():
    assert found([1.0, 0.0, 1.0, 1.0], 0.75).groups == {"a": (1.0, 2), "b": (0.5, 2)}


def test_one_that_is_not_stays_as_it_is():
    assert found([1.0, 0.0, 1.0, 1.0], math.exp(0.75)).groups is None


def test_the_table_has_errors_over_groups_only_where_there_are_groups():
    plain = {"task": "t", "metric": "acc", "value": 0.5, "stderr": 0.1, "samples": 8}
    grouped = plain | {"group_stderr": 0.25, "groups": {"a": [0.25, 4], "b": [0.75, 4]}}
    texts = []
    for scores in ([plain], [plain, grouped]):
        console = Console(file=io.StringIO(), width=120)
        print_rows([{"run": "runs/fox", "scores": scores}], console)
        texts.append(console.file.getvalue())
    assert "by group" not in texts[0]
    assert "by group" in texts[1]
    assert "0.2500" in texts[1]
