"""The configuration of a comparison: what it refuses, and that reading it needs no torch."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import Any

import pytest

from normlab.compare import CompareConfig
from normlab.errors import NormLabError
from normlab.models.config import DecoderConfig
from normlab.train.config import TrainConfig
from tests.compare import small


def configuration(**changes: Any) -> CompareConfig:
    return CompareConfig(base=small.base("text"), **changes)


def test_aliases_and_options_become_the_scheme_they_name() -> None:
    config = configuration(schemes=("Pre-LN", "peri( step = 0.1 )", "sandwich"), baseline="prenorm")
    assert config.names[:2] == ("pre", "peri(step=0.1)")
    assert str(config.baseline) == "pre"
    assert str(config.run("peri(step=0.1)", 0.5, 7).model.scheme) == "peri(step=0.1)"


def test_a_run_is_the_base_but_for_scheme_rate_and_seed() -> None:
    config = configuration()
    run = config.run("post", 3e-3, 5).to_dict()
    expected = config.base.to_dict()
    expected |= {"lr": 3e-3, "seed": 5, "model": expected["model"] | {"scheme": "post"}}
    assert run == expected


@pytest.mark.parametrize(
    ("schemes", "baseline"),
    [(("post", "pre", "peri"), "pre"), (("post", "peri"), "post"), (("peri(step=0.1)", "post"), "peri(step=0.1)")],
)
def test_the_baseline_is_pre_or_the_first(schemes: tuple[str, ...], baseline: str) -> None:
    assert str(configuration(schemes=schemes).baseline) == baseline


def test_it_can_be_written_as_json() -> None:
    facts = configuration(schemes=("pre", "ngpt")).to_dict()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["schemes"] == ["pre", "ngpt"]
    assert not {"lr", "seed"} & facts["base"].keys()
    assert "scheme" not in facts["base"]["model"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schemes": ("pre", "geonrom")}, "did you mean 'geonorm'"),
        ({"schemes": ()}, "at least one scheme"),
        ({"schemes": ("pre", "post", "pre-ln")}, "pre is named twice"),
        ({"schemes": ("post", "peri"), "baseline": "pre"}, "baseline 'pre' is not among the schemes (post, peri)"),
        ({"baseline": "psot"}, "did you mean 'post'"),
        ({"lrs": ()}, "at least one rate"),
        ({"lrs": "atuo"}, "lrs must be auto or numbers, got 'atuo'"),
        ({"lrs": ("auto", "1e-3")}, "lrs must be auto or numbers"),
        ({"retries": -1}, "retries must not be negative, got -1"),
        ({"lrs": (1e-3, 2e-3, 0.001)}, "rate 0.001 is named twice"),
        ({"lrs": (1e-3, 0.0)}, "positive and finite, got 0.0"),
        ({"lrs": (float("nan"),)}, "positive and finite, got nan"),
        ({"lrs": (float("inf"),)}, "positive and finite, got inf"),
        ({"seeds": 0}, "seeds must lie in [1, 1000], got 0"),
        ({"seeds": 1001}, "seeds must lie in [1, 1000], got 1001"),
        ({"tune_seeds": 0}, "tune_seeds must be at least 1"),
        ({"lrs": (1e-3,), "widen_rates": True}, "widen_rates needs two rates or more, got one"),
        ({"level": 1.0}, "between 0 and 1"),
        ({"on": "cloud"}, "unknown place to run 'cloud'"),
        ({"workers": 0}, "workers must be at least 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NormLabError) as error:
        configuration(**changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_rates_are_searched_unless_they_are_listed() -> None:
    assert configuration().lrs == configuration(lrs=["auto"]).lrs == "auto"
    assert configuration(lrs=[1e-3, 2e-3]).bracket is None
    assert configuration(lrs=[1e-3, 2e-3]).first_rates == (1e-3, 2e-3)


def test_a_scheme_that_the_model_cannot_have_is_refused_at_once() -> None:
    base = TrainConfig(model=DecoderConfig(depth=1, dim=8, heads=1, tied=True))
    with pytest.raises(NormLabError, match="ngpt needs a head of its own"):
        CompareConfig(base=base, schemes=("pre", "ngpt"))


def test_the_command_line_reads_the_fields_without_torch() -> None:
    code = "import sys; from normlab.compare import CompareConfig; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("tied", "schemes", "heads"),
    [
        (None, ("pre", "post"), {True}),
        (None, ("pre", "ngpt"), {False}),
        (False, ("pre", "ngpt"), {False}),
        (True, ("pre", "post"), {True}),
    ],
)
def test_all_schemes_have_the_same_kind_of_head(tied: bool | None, schemes: tuple[str, ...], heads: set[bool]) -> None:
    base = TrainConfig(model=DecoderConfig(depth=1, dim=8, heads=1, tied=tied))
    models = CompareConfig(base=base, schemes=schemes).models
    assert {model.tied_head for model in models.values()} == heads  # pyright: ignore[reportAttributeAccessIssue]


def test_what_compare_json_says_of_a_comparison_is_pinned() -> None:
    """Hashes of the records that commit bb4c94d wrote: comparisons of that version are taken up."""
    hashes = {"language": "4540e5e0", "masked": "7953bd80", "images": "32373465"}
    for task, expected in hashes.items():
        facts = CompareConfig(base=TrainConfig.from_dict({"task": task, "batch": 8}), seeds=2).to_dict()
        assert hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8] == expected, task
