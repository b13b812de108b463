"""Two checks side by side: what differs, what is alike, JSON and back, the card."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from normlab.checks.judge.verdict import Verdict
from normlab.checks.view.card import text
from normlab.checks.view.side_by_side import Against, figures
from normlab.errors import NormLabError
from tests.checks import finished


@pytest.fixture(scope="module")
def pair() -> Against:
    return Against(finished.check(name="peri"), finished.collapsing())


def test_the_headline_names_both(pair: Against) -> None:
    words = "peri is stable at 24 blocks; post will lose its gradient and collapse its tokens into one when deep"
    assert pair.headline.startswith(words)
    assert Against(pair.first, pair.first).headline == "Both are stable at 24 blocks"
    assert Against(pair.second, pair.second).headline.startswith("Both will lose their gradient")


def test_what_differs_comes_first(pair: Against) -> None:
    names = [difference.name for difference in pair.differences]
    assert names[:3] == ["forward", "backward", "collapse"]
    better = {difference.name: difference.better for difference in pair.differences}
    assert better["backward"] == better["collapse"] == "first"
    # Bounded and random walk are different findings, and both are fine.
    assert better["forward"] == better["unsteady"] == "neither"
    assert [d.name for d in pair.differences if not d.is_fine] == ["forward", "backward", "collapse"]
    assert {d.better for d in Against(pair.second, pair.first).differences} == {"second", "neither"}


def test_a_verdict_that_one_check_lacks_speaks_for_neither(pair: Against) -> None:
    extra = Verdict(name="norm drift", finding="fine", level="ok")
    wider = dataclasses.replace(pair.first, verdicts=(*pair.first.verdicts, extra))
    found = next(d for d in Against(wider, pair.second).differences if d.name == "norm drift")
    assert (found.first, found.second, found.better) == (extra, None, "unknown")


def test_figures_are_those_of_the_judged_stack(pair: Against) -> None:
    found = figures(pair.second)
    assert found["Gradient's gain G"] == pytest.approx(1e-7, rel=1e-9)
    assert found["Top token cosine"] == pytest.approx(0.999)
    assert found["RMS of the last state"] == pytest.approx(1.1)
    assert found["Growth, RMS ∝ L^p"] == pytest.approx(0.0)
    assert pair.figures["Loss (nats)"] == (pytest.approx(3.7), pytest.approx(3.7))


def test_it_is_about_the_first_design(pair: Against) -> None:
    assert pair.level == "ok"
    assert pair.failed("vanishing,collapse") == []
    turned = Against(pair.second, pair.first)
    assert turned.level == "fail"
    assert [verdict.name for verdict in turned.failed("vanishing,collapse")] == ["backward", "collapse"]


def test_json_and_back(pair: Against, tmp_path: Path) -> None:
    path = pair.save(tmp_path / "pair.json")
    assert Against.from_dict(json.loads(path.read_bytes())) == pair
    with pytest.raises(NormLabError, match="not a pair of checks"):
        Against.from_dict({"schema": 7})
    with pytest.raises(NormLabError, match="unknown field of pair of checks"):
        Against.from_dict(pair.first.to_dict())


@pytest.mark.parametrize("width", [60, 84, 120])
def test_the_card_shows_both(pair: Against, width: int) -> None:
    card = text(pair, width)
    assert max(map(len, card.splitlines())) <= width
    assert "✗ vanishing" in card
    assert "alike and fine in both: " in card
    assert card.count("hidden size") == 2
    # Remedies are for the design that was asked about, which needs none here.
    assert "To try" not in card
    assert "To try" in text(Against(pair.second, pair.first), width)
