"""Coordinate checks as a whole: known exponents, negative controls, planted faults, bad input, and what is shown."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import normlab
from normlab import NormLabError
from normlab.checks.coordinates.records import CoordinateCheck
from normlab.checks.coordinates.words import headline, labels, level, sentences
from normlab.checks.schema import schema
from normlab.train.transfer import Transfer
from tests.browser import browsing
from tests.checks.coordinates import known

SMALL = {"length": 16, "batch_size": 8, "steps": 1, "max_seconds": 600.0}
ACROSS = {"widths": (32, 64, 128), "depths": (2,), **SMALL}
DEEP = {"width": 32, "widths": (32,), "depths": (4, 8, 16), **SMALL}


@cache
def plain() -> CoordinateCheck:
    return normlab.check_coordinates(known.without_rule, widths=(8, 16, 32), depths=(2, 4, 8), steps=2, lr=1e-3)


def changes(check: CoordinateCheck, axis) -> dict[str, str]:
    found = check.axis(axis)
    assert found is not None
    return {trend.module: trend.change for trend in found.trends}


# -- closed form -------------------------------------------------------------------------------------------------------


def test_exponents_known_in_closed_form() -> None:
    for axis, state in (("width", 1.0), ("depth", 1.0)):
        found = plain().axis(axis)
        assert found is not None
        matrix, last = found.trends
        for fit in (last.first, last.last):
            # Sums around 10 in fp32 at the smallest change, 1e-3 · 8 · 2: 1e-6 / 0.016 at most.
            assert fit is not None
            assert fit.exponent == pytest.approx(state, abs=2e-4)
        # In every block the same, whatever the depth.
        assert matrix.first is not None
        assert matrix.first.exponent == pytest.approx(float(axis == "width"), abs=2e-4)
    assert changes(plain(), "width") == {"layers.*.matrix": "grows", "layers (last)": "grows"}
    assert changes(plain(), "depth") == {"layers.*.matrix": "flat", "layers (last)": "grows"}
    # Nothing was claimed.
    assert not plain().failed
    assert level(plain()) == "warn"


def test_a_model_with_its_own_rule_is_flat() -> None:
    check = normlab.check_coordinates(known.with_rule, widths=(8, 16, 32), depths=(2, 4, 8), steps=2, lr=1e-3)
    for axis in check.axes:
        last = axis.trends[-1]
        assert last.change == "flat"
        assert last.first is not None
        assert last.first.exponent == pytest.approx(0.0, abs=2e-3)


# -- negative controls and planted faults ------------------------------------------------------------------------------


def unscaled_rates(transfer, model, rule="adamw"):
    return {name: 1.0 for name, _ in model.named_parameters()}


def test_a_rate_that_is_not_divided_is_found(monkeypatch) -> None:
    assert not normlab.check_coordinates("pre", base_dim=32, **ACROSS).failed
    monkeypatch.setattr(Transfer, "rates", unscaled_rates)
    check = normlab.check_coordinates("pre", base_dim=32, **ACROSS)
    assert check.failed
    assert level(check) == "fail"
    assert headline(check).startswith("The transfer rules do not hold: changes in training grow with width in")
    found = changes(check, "width")
    # The embedding's rate is 1 under the rule as well.
    assert {name for name, change in found.items() if change == "grows"} == found.keys() - {"embedding"}


@pytest.mark.full
def test_an_initialisation_that_is_not_scaled_is_found(monkeypatch) -> None:
    monkeypatch.setattr(Transfer, "init_", Transfer.attach_)
    check = normlab.check_coordinates("pre", base_dim=32, **ACROSS)
    assert check.failed
    axis = check.axis("width")
    assert axis is not None
    larger = {trend.module: trend.start.exponent for trend in axis.trends if trend.size == "grows"}
    # One matrix between norms and its output: √width, for the number of its inputs.
    assert larger["stack.layers.*.branches.0.qkv"] == pytest.approx(0.5, abs=0.05)
    assert larger["stack.layers.*.branches.1.up"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.full
def test_a_rate_that_is_divided_twice_is_found(monkeypatch) -> None:
    real = Transfer.rates
    twice = lambda self, model, rule="adamw": {name: x**3 for name, x in real(self, model, rule).items()}  # noqa: E731
    monkeypatch.setattr(Transfer, "rates", twice)
    check = normlab.check_coordinates("pre", base_dim=32, **ACROSS)
    assert check.failed
    assert "shrinks" in changes(check, "width").values()


@pytest.mark.full
def test_without_the_rules_pre_norm_grows_with_width() -> None:
    check = normlab.check_coordinates("pre", **ACROSS)
    found = changes(check, "width")
    assert {name for name, change in found.items() if change == "grows"} == found.keys() - {"embedding"}
    assert not check.failed
    assert any("--base-dim applies the rules" in line for line in sentences(check))


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["pre", "peri", "geonorm", "spannorm", "ngpt", "post"])
def test_with_the_rules_changes_do_not_depend_on_the_width(scheme) -> None:
    options = SMALL | {"steps": 4, "widths": (64, 128, 256), "depths": (2,), "base_dim": 64}
    found = changes(normlab.check_coordinates(scheme, **options), "width")
    assert set(found.values()) <= {"flat", "as its size"}
    # Unit vectors have entries of 1/√width, and so have their changes; elsewhere the initial logits alone shrink.
    assert scheme == "ngpt" or {change for name, change in found.items() if name != "logits"} == {"flat"}


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["pre", "peri", "lns", "layerscale"])
def test_over_depth_changes_are_flat_with_the_derived_rule(scheme) -> None:
    check = normlab.check_coordinates(scheme, base_depth=4, **DEEP)
    axis = check.axis("depth")
    assert axis is not None
    assert axis.rule == "derived"
    assert not check.failed
    assert "grows" not in {trend.change for trend in axis.trends}


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["pre", "peri"])
def test_over_depth_changes_grow_without_it(scheme) -> None:
    found = changes(normlab.check_coordinates(scheme, **DEEP), "depth")
    assert found["stack.layers (last)"] == "grows"


# -- what is stored, said and shown ------------------------------------------------------------------------------------


def test_json_round_trip_and_schema() -> None:
    text = plain().to_json()
    assert CoordinateCheck.from_json(text) == plain()
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema(CoordinateCheck))
    jsonschema.Draft202012Validator.check_schema(schema(CoordinateCheck))
    assert list(validator.iter_errors(json.loads(text))) == []
    assert list(validator.iter_errors(json.loads(text) | {"threshold": "high"})) != []
    assert schema(CoordinateCheck)["title"] == "NormLab coordinate check, schema 1"


def test_the_words() -> None:
    words = "Changes in training grow with width in 2 of 2 modules and grow with depth in 1 of 2 modules"
    assert headline(plain()) == words
    over_width, advice, over_depth, _ = sentences(plain())
    assert over_width.startswith("Over width 8, 16, 32 at 2 blocks, without a transfer rule: changes grow in ")
    assert "too large at a greater one" in advice
    assert "--base-dim" not in advice
    assert "state after the last block (+1.00 ± 0.00)" in over_depth
    assert "changes are flat within ±0.25 in 1 of 2 modules" in over_depth


def test_what_shrinks_with_its_own_size_is_not_called_flat() -> None:
    over_width, over_depth = plain().axes
    matrix, last = over_depth.trends
    changed = replace(over_depth, trends=(matrix, replace(last, change="as its size")))
    words = sentences(replace(plain(), axes=(over_width, changed)))[-1]
    assert "changes shrink, but no faster than the output itself, in state after the last block (+1.00" in words
    assert "changes are flat within ±0.25 in 1 of 2 modules" in words


def test_the_card() -> None:
    lines = plain().table().splitlines()
    row = next(line for line in lines if line.strip().startswith("*.matrix"))
    assert row.split()[-1] == "grows"
    assert "+1.00 ± 0.00" in row
    assert all(len(line) <= 110 for line in lines)
    assert "−0.00" not in plain().table()


def test_labels_are_short_only_where_they_stay_unique() -> None:
    one = ["embedding", "stack.layers.*.qkv", "stack.layers (last)"]
    assert list(labels(one).values()) == ["embedding", "*.qkv", "state after the last block"]
    two = ["encoder.*.qkv", "decoder.*.qkv", "encoder (last)", "decoder (last)"]
    assert len(set(labels(two).values())) == 4


def test_a_page_without_anything_from_outside(tmp_path: Path) -> None:
    html = plain().save(tmp_path / "page.html").read_text(encoding="utf-8").partition("<script>")[0]
    assert re.findall(r'<section id="([a-z]+)"', html) == [
        "exponents", "values", "width", "depth", "configuration", "reproduce",
    ]  # fmt: skip
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', html)
    assert "*.matrix" in html


@browsing
@pytest.mark.full
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_in_a_browser(open_page, tmp_path: Path, width) -> None:
    file = plain().save(tmp_path / "page.html")
    page = open_page(file.as_uri(), viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawn = page.evaluate("[...document.querySelectorAll('.js-plotly-plot')].map((p) => [p.id, p.data.length])")
    assert [name for name, _ in drawn] == [
        "plot-exponents-width", "plot-exponents-depth", "plot-values-width", "plot-values-depth",
    ]  # fmt: skip
    assert all(count for _, count in drawn)
    # The line of the state in the first step: lr · width · 2 blocks.
    state = page.evaluate("document.getElementById('plot-values-width').data.map((t) => t.y)")[-1]
    assert state == pytest.approx([1e-3 * size * 2 for size in (8, 16, 32)], rel=1e-3)
    page.check("input[name='value-what'][value='size']", force=True)
    title = page.evaluate("document.getElementById('plot-values-width').layout.yaxis.title.text")
    assert title == "RMS, step 1"


# -- bad input, and sizes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": (32,), "depths": (2,)}, "one width and one depth"),
        ({"base_dim": 0}, "base_dim must be a whole number from 1"),
        ({"widths": (32, 33), "depths": (2,)}, "width must be even"),
    ],
)
def test_bad_sizes_are_refused_in_one_line(options, message) -> None:
    with pytest.raises(NormLabError, match=message) as error:
        normlab.check_coordinates("pre", **options)
    assert "\n" not in str(error.value)


def test_rules_are_for_our_own_models() -> None:
    with pytest.raises(NormLabError, match="for schemes and runs, not for a factory target"):
        normlab.check_coordinates(known.without_rule, base_dim=8)
    with pytest.raises(NormLabError, match="add --coordinates"):
        normlab.check("pre", base_dim=8)
    with pytest.raises(NormLabError, match=r"normlab\.check_coordinates"):
        normlab.check("pre", coordinates=True)


def test_an_axis_of_one_size_is_left_out() -> None:
    check = normlab.check_coordinates(known.without_rule, widths=(8,), depths=(2, 4), steps=1, lr=1e-3)
    assert [axis.name for axis in check.axes] == ["depth"]
    assert check.notes == ("one width alone: nothing was fitted over it",)


def test_a_hypothesis_cannot_fail() -> None:
    check = normlab.check_coordinates("post", base_depth=2, **SMALL | {"width": 16, "widths": (16,), "depths": (2, 4)})
    axis = check.axis("depth")
    assert axis is not None
    assert axis.rule == "hypothesis"
    assert not check.failed
    assert any("is a hypothesis" in line for line in sentences(check))


def test_seeds_are_at_least_three_and_steps_eight() -> None:
    config = normlab.checks.CheckConfig(coordinates=True)
    assert (config.burst_steps, normlab.checks.CheckConfig().burst_steps) == (8, 30)
    assert {point.seed for point in plain().axes[0].trends[0].points} == {0, 1, 2}
    assert math.isclose(plain().lr, 1e-3)
