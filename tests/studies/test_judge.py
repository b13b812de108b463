"""One bad study is an open finding that names what is wrong; the others are judged."""

from __future__ import annotations

import json
import tomllib

import pytest

from normlab.studies import command
from normlab.studies.judge import judge_claims
from normlab.studies.study import Study, read_study
from normlab.studies.view import report
from normlab.studies.view.summary import counts_of_result, refuted_list
from tests.studies.rows import TINY, row, write_study

RULES = {
    "rate": 'kind = "rate"\nscheme = "pre"',
    "count": 'kind = "count"\nscheme = "pre"\nlrs = [1e-3]\nat_most = 0.0',
}


def text(rule: str) -> str:
    return TINY.partition("[claims.rule]")[0] + "[claims.rule]\n" + rule


def store(folder, study: Study, rows: list[dict], arm: str = "main") -> None:
    (folder / arm).mkdir(parents=True, exist_ok=True)
    stamp = {"study": study.name, "rule": study.rule_hash}
    (folder / arm / "rows.jsonl").write_text("".join(json.dumps({**one, **stamp}) + "\n" for one in rows))
    (folder / "study.json").write_text(json.dumps({"runs": len(rows), "left": 0, **stamp}))


def without(field: str) -> list[dict]:
    rows = [row(scheme, seed, 4.0 + seed) for scheme in ("pre", "post") for seed in range(3)]
    return [{name: value for name, value in one.items() if name != field} for one in rows]


@pytest.mark.parametrize(("kind", "field"), [("rate", "role"), ("count", "lr")])
def test_a_row_without_a_field_leaves_its_claim_open(kind, field, tmp_path):
    study = read_study("tiny", tomllib.loads(text(RULES[kind])), "tiny.toml")
    store(tmp_path / "tiny", study, without(field))
    found = judge_claims(study, tmp_path)["gap"]
    assert found.verdict == "open"
    assert f"a row has no field {field!r}" in found.notes


def test_a_corrected_rule_shows_both_verdicts(tmp_path):
    correction = "\n[claims.correction]\nwhy = 'a tenth is enough'\nby = 0.1\ndirection = 'below'\n"
    rule = 'kind = "difference"\nscheme = "pre"\nagainst = "post"\nby = 2.0\ndirection = "within"'
    study = read_study("tiny", tomllib.loads(text(rule + correction)), "tiny.toml")
    noise = (0.0, 0.01, -0.01)
    rows = [row(scheme, seed, mean + seed + (noise[seed] if scheme == "pre" else 0.0))
            for scheme, mean in (("pre", 4.0), ("post", 3.5)) for seed in range(3)]  # fmt: skip
    store(tmp_path / "tiny", study, rows)
    found = judge_claims(study, tmp_path)["gap"]
    assert found.verdict == "refuted"
    assert "the rule was corrected after its runs, because a tenth is enough" in found.notes[0]
    assert "as registered it says reproduced (" in found.notes[0]
    studies = write_study(tmp_path / "studies", text(rule + correction))
    page = report.markdown(report.claim_lines(studies, tmp_path))
    assert "**✗ refuted, rule corrected** · " in page
    assert "refuted, rule corrected" in report.claims_page(report.claim_lines(studies, tmp_path))


def test_a_verdict_on_rows_that_were_there_before_its_rule_says_so(tmp_path):
    imported = 'kind = "rows"\nrows = ["elsewhere"]\n' + text(RULES["count"])
    study = read_study("tiny", tomllib.loads(imported), "tiny.toml")
    studies = write_study(tmp_path / "studies", imported)
    assert report.claim_lines(studies, tmp_path)[0].verdict == "not run"
    store(tmp_path / "tiny", study, [row("pre", seed, 4.0) for seed in range(6)])
    assert report.claim_lines(studies, tmp_path)[0].verdict == "reproduced, rows known before"


def test_a_registered_rule_that_cannot_be_decided_can_be_corrected(tmp_path):
    correction = "\n[claims.correction]\nwhy = 'the arm has another name'\narms = ['main']\n"
    study = read_study("tiny", tomllib.loads(text(RULES["count"] + '\narms = ["no-*"]' + correction)), "tiny.toml")
    store(tmp_path / "tiny", study, [row(scheme, seed, 4.0) for scheme in ("pre", "post") for seed in range(6)])
    found = judge_claims(study, tmp_path)["gap"]
    assert found.verdict == "reproduced"
    assert "as registered it cannot be decided (no arm matches no-*" in found.notes[-1]


def test_our_own_questions_are_counted_apart(tmp_path):
    own = TINY.replace('theirs = "0 of 3"', 'theirs = "0 of 3"\nnumber = 6\nown_question = true')
    studies = write_study(tmp_path / "studies", own.replace('theirs = "2 nats"', 'theirs = "2 nats"\nnumber = 6'))
    study = read_study("tiny", tomllib.loads(own), "tiny.toml")
    rows = [row(scheme, seed, 4.0 + seed, diverged=7) for scheme in ("pre", "post") for seed in range(3)]
    store(tmp_path / "tiny", study, rows)
    found = report.claim_lines(studies, tmp_path)
    assert "2 claims: 1 refuted, 1 open. Among them one question that no paper answers." in report.headline(found)
    assert counts_of_result(found, 6) == "1 open; questions beyond the paper: 1 refuted"
    assert "- Source: no result of a paper: nobody\n" in report.markdown(found)
    assert [line.finding.verdict for line in found if line.claim.own_question] == ["refuted"]
    assert refuted_list(found) == ""


def test_an_arm_without_rows_leaves_its_claim_open(tmp_path):
    study = read_study("tiny", tomllib.loads(text(RULES["count"] + '\narms = ["none-*"]')), "tiny.toml")
    store(tmp_path / "tiny", study, [row(scheme, 0, 4.0) for scheme in ("pre", "post")])
    found = judge_claims(study, tmp_path)["gap"]
    assert found.verdict == "open"
    assert "no arm matches none-*" in found.notes[0]


def test_two_ladders_leave_the_claims_open(tmp_path):
    study = read_study("tiny", tomllib.loads(TINY), "tiny.toml")
    rows = [row("pre", 0, 4.0, size="2x16", budget=768)]
    for arm in ("one", "two"):
        store(tmp_path / "tiny", study, rows, arm)
    found = judge_claims(study, tmp_path)
    assert {one.verdict for one in found.values()} == {"open"}
    assert "a study has one ladder" in found["gap"].notes[0]


@pytest.mark.parametrize("field", ["role", "budget"])
def test_the_list_and_the_report_of_all_studies_go_on(field, tmp_path, capsys):
    studies, results = write_study(tmp_path / "studies", text(RULES["rate"])), tmp_path / "results"
    write_study(studies, TINY, name="other")
    study = read_study("tiny", tomllib.loads(text(RULES["rate"])), "tiny.toml")
    rows = [{**one, "size": "2x16", "budget": "many"} for one in without("role")] if field == "budget" else (
        without(field)
    )  # fmt: skip
    store(results / "tiny", study, rows)
    command.show_list(studies, results)
    assert "1 open" in capsys.readouterr().out
    assert "3 claims: 1 open, 2 not run." in report.markdown(report.claim_lines(studies, results))


@pytest.mark.parametrize(("field", "value"), [("value", "3"), ("lr", [1e-3]), ("loss", True)])
def test_a_number_that_is_none_leaves_the_claim_open_and_is_named(field, value, tmp_path):
    """Text in place of a number ended the list and the report of all studies."""
    study = read_study("tiny", tomllib.loads(text(RULES["count"])), "tiny.toml")
    rows = [row("pre", seed, 4.0) for seed in range(3)]
    store(tmp_path / "tiny", study, [*rows[:2], {**rows[2], field: value}])
    found = judge_claims(study, tmp_path)["gap"]
    assert found.verdict == "open"
    assert f"{field} of {rows[2]['run']} must be a number or null, got {value!r}; restore the row" in found.notes[0]
