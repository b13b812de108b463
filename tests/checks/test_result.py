"""The result of a check: what it answers, JSON and back, files, and what `--fail-on` means."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normlab.checks.judge import fail_on
from normlab.checks.judge.ladder_verdicts import judge_ladder
from normlab.checks.judge.remedies import MENU
from normlab.checks.judge.verdict import Verdict
from normlab.checks.result import Check, RateLadder, Twin
from normlab.checks.theory.records import GradientSlope, ScaleRow, Theory, TheoryLook, Trend
from normlab.errors import NormLabError
from normlab.utils.files import writable
from normlab.utils.records import from_plain, to_plain
from tests.checks import finished

THEORY = Theory(
    scheme="peri", depth=24, growth="linear", forward="linear at worst", predicted=(1.0, None), certificate="a bound",
    before=TheoryLook(step=0, certificate=(1.0, 3.0), used=(1.0, 0.5), slopes=(
        GradientSlope(branch="mlp.down", values=(1.0, 2.0), trend=Trend(exponent=1.0, low=0.5, high=1.5)),)),
    scale_test=(ScaleRow(block=0, branch="mlp.down", factors=(0.5, 1.0), gains=(1.0, 1.0), slope=0.0,
                         finding="scale-free"),),
)  # fmt: skip
RATES = RateLadder(
    depth=12, steps=60, rates=(1e-4, 1e-3), losses=(4.0, None), start=4.3, reference=3.0, reference_from="twin",
    usable=None, decades=0.0, sens=0.7, lr_max=1e-4, twin=Twin(name="pre", losses=(3.5, 3.0)),
)  # fmt: skip


def full() -> Check:
    return finished.check(theory=THEORY, rates=RATES, notes=("48 blocks left out",), **finished.ladders())


def test_json_and_back_is_the_same_check() -> None:
    check = full()
    again = Check.from_json(check.to_json())
    assert again == check
    assert again.to_json() == check.to_json()
    assert again.theory is not None
    assert again.theory.before == THEORY.before


def test_json_is_strict_where_values_are_not_finite() -> None:
    broken = dataclasses.replace(full(), seconds=math.inf, curves={"6": (4.3, math.nan)})
    assert "NaN" not in broken.to_json()
    assert "Infinity" not in broken.to_json()
    # A field that allows no None gives NaN back; one that does, None.
    again = Check.from_json(broken.to_json())
    assert math.isnan(again.seconds)
    assert again.curves == {"6": (4.3, None)}


def test_profiles_keep_the_places_that_were_not_finite() -> None:
    rungs = finished.ladder((6, 12))
    rms = [1.0, math.inf, *rungs.profiles[0].rms[2:]]
    torn = dataclasses.replace(rungs, profiles=(dataclasses.replace(rungs.profiles[0], rms=rms), *rungs.profiles[1:]))
    check = finished.check(torn)
    assert Check.from_json(check.to_json()).ladder.profiles[0].unfit == {"rms": [1]}
    assert check.verdict("forward").finding == "exploding"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema 1"),
        ({"verdicts": None}, r"check\.verdicts must be a list"),
        ({"seconds": "long"}, r"check\.seconds must be a number, got 'long'"),
        ({"targat": {}}, "did you mean 'target'"),
        ({"target": {"name": "x", "kind": "scheme"}}, r"check\.target has no 'depth'"),
        ({"ladder": {"profiles": [{"boundaries": True}]}}, r"profiles\[0\]\.boundaries must be of type int, got True"),
        ({"ladder": {"profiles": []}}, "at least one profile"),
    ],
)
def test_a_file_that_was_changed_is_refused_with_the_place(change: dict[str, Any], words: str) -> None:
    with pytest.raises(NormLabError, match=words) as caught:
        Check.from_json(json.dumps(full().to_dict() | change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3"])
def test_what_is_no_check_is_refused(text: str) -> None:
    with pytest.raises(NormLabError, match="not a check"):
        Check.from_json(text)


def test_a_field_without_default_must_be_there() -> None:
    record = full().to_dict()
    del record["ladder"]
    with pytest.raises(NormLabError, match="check has no 'ladder'"):
        Check.from_dict(record)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    kind: Literal["a", "b"]
    pair: tuple[int, float | None]


@dataclasses.dataclass(frozen=True)
class _Tree:
    leaves: dict[str, tuple[_Leaf, ...]]
    mixed: list[int | str]
    anything: Any = None


@given(
    st.builds(
        _Tree,
        leaves=st.dictionaries(
            st.text(),
            st.lists(
                st.builds(
                    _Leaf, kind=st.sampled_from(["a", "b"]),
                    pair=st.tuples(st.integers(), st.none() | st.floats(allow_nan=False, allow_infinity=False)),
                ),
                max_size=3,
            ).map(tuple),
            max_size=3,
        ),
        mixed=st.lists(st.integers() | st.text(), max_size=4),
        anything=st.none() | st.booleans() | st.lists(st.integers(), max_size=3),
    )
)  # fmt: skip
def test_records_survive_json(tree: _Tree) -> None:
    assert from_plain(_Tree, json.loads(json.dumps(to_plain(tree))), "tree") == tree


def test_records_refuse_the_wrong_kind_of_leaf() -> None:
    good = {"leaves": {"x": [{"kind": "a", "pair": [1, 2.0]}]}, "mixed": []}
    for change, words in (("c", "one of 'a', 'b'"), (True, "one of")):
        bad = {**good, "leaves": {"x": [{"kind": change, "pair": [1, 2.0]}]}}
        with pytest.raises(NormLabError, match=words):
            from_plain(_Tree, bad, "tree")
    with pytest.raises(NormLabError, match="a list of 2"):
        from_plain(_Tree, {**good, "leaves": {"x": [{"kind": "a", "pair": [1]}]}}, "tree")


def test_level_and_trouble_follow_the_verdicts() -> None:
    assert finished.check().level == "ok"
    assert finished.check().trouble == []
    bad = finished.exploding()
    assert bad.level == "fail"
    levels = [verdict.level for verdict in bad.trouble]
    assert levels == sorted(levels, key=["fail", "warn"].index)
    assert bad.verdict("backward").finding == "exploding"
    with pytest.raises(NormLabError, match="did you mean 'forward'"):
        bad.verdict("foward")


def test_the_judged_stack_is_no_deeper_than_the_design() -> None:
    check = finished.check(finished.ladder((6, 12, 24)))
    shallow = dataclasses.replace(check, target=dataclasses.replace(check.target, depth=14))
    assert (check.depth, shallow.depth) == (24, 12)
    assert (shallow.profile().depth, shallow.profile().step, shallow.profile("before").step) == (12, 30, 0)
    tiny = dataclasses.replace(check, target=dataclasses.replace(check.target, depth=3))
    assert tiny.depth == 6


def test_fail_on_names_findings_and_verdicts() -> None:
    bad = finished.exploding()
    assert [verdict.name for verdict in bad.failed("exploding,vanishing,collapse")] == ["backward"]
    assert [verdict.name for verdict in bad.failed(["backward"])] == ["backward"]
    assert bad.failed("vanishing,collapse") == []
    assert bad.failed("") == []
    assert [verdict.name for verdict in bad.failed()] == ["backward"]


def test_a_warning_fires_only_where_it_is_asked_for() -> None:
    bad = finished.exploding()
    assert bad.verdict("headroom").level == "warn"
    assert bad.failed("little headroom") == []
    assert [verdict.name for verdict in bad.failed("little headroom:warn")] == ["headroom"]
    assert {verdict.name for verdict in bad.failed("any:warn")} == {"forward", "backward", "headroom"}


def test_fail_on_is_checked_before_any_work() -> None:
    assert fail_on.parse(" exploding , dead  depth:warn,, ") == ("exploding", "dead depth:warn")
    assert fail_on.parse(("exploding", "collapse,unsteady")) == ("exploding", "collapse", "unsteady")
    with pytest.raises(NormLabError, match="did you mean 'exploding'"):
        fail_on.parse("explodig")
    with pytest.raises(NormLabError, match="unknown finding to fail on 'fine'"):
        fail_on.parse("fine")


def test_every_verdict_and_every_finding_can_be_failed_on() -> None:
    judged = {verdict.name for verdict in judge_ladder(finished.ladder())}
    assert judged <= fail_on.VERDICTS
    # The two explosions share a finding; the menu of remedies tells them apart.
    cured = {finding for remedy in MENU for finding in remedy.cures} - {"exploding gradient"}
    assert cured <= fail_on.FINDINGS


@given(st.sampled_from(["ok", "warn", "fail"]), st.sampled_from(sorted(fail_on.FINDINGS)), st.booleans())
def test_what_fires_is_at_least_as_bad_as_asked(level: Any, finding: str, warn: bool) -> None:
    verdict = Verdict(name="forward", finding=finding, level=level)
    fired = fail_on.fired([verdict], f"{finding}:warn" if warn else finding)
    assert bool(fired) == (level == "fail" or (warn and level == "warn"))


def test_save_follows_the_suffix(tmp_path: Path) -> None:
    check = full()
    path = check.save(tmp_path / "check.json")
    assert Check.from_json(path.read_bytes()) == check
    assert check.save(tmp_path / "check.HTML").read_text().startswith("<!doctype html>")
    with pytest.raises(NormLabError, match=r"must end in \.json or \.html"):
        check.save(tmp_path / "check.pdf")
    assert {entry.name for entry in tmp_path.iterdir()} == {"check.json", "check.HTML"}


def test_a_path_that_cannot_be_written_is_refused_early(tmp_path: Path) -> None:
    assert writable(tmp_path / "a.html", ".html") == tmp_path / "a.html"
    with pytest.raises(NormLabError, match=r"must end in \.json; try .*a\.json"):
        writable(tmp_path / "a.html", ".json")
    with pytest.raises(NormLabError, match="is not a folder"):
        writable(tmp_path / "missing" / "a.json", ".json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(NormLabError, match="is a folder"):
        writable(tmp_path / "folder.json", ".json")
    # No name that a suffix could be given to.
    for folder in (".", "/"):
        with pytest.raises(NormLabError, match=r"is a folder; expected a file, e\.g\. /?report\.json"):
            writable(folder, ".json")
