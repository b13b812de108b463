"""A tiny study from its file to its verdicts: in pieces, under one rule, with a report made of rows alone."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from normlab.compare import executor
from normlab.compare.store import Store
from normlab.data.tokenizer import train_bpe
from normlab.errors import NormLabError
from normlab.studies import command
from normlab.studies import run as running
from normlab.studies.judge import judge_claims
from normlab.studies.rules import read_rule
from normlab.studies.run import run_study, study_plan
from normlab.studies.study import load_study, read_study
from normlab.studies.view import citations, report, summary
from tests.compare.here import Here
from tests.compare.small import held_out, write_text
from tests.studies.rows import CLAIM, TINY, other, write_study


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        # Also where these tests are a copy without .git.
        patch.setattr("normlab.studies.preflight.is_unnamed_copy", lambda: False)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny study, done in this process."""
    folder = tmp_path_factory.mktemp("root")
    text = write_text(folder / "text")
    write_study(folder / "studies", data=[str(text)], val_data=[str(held_out(text))])
    study = load_study("tiny", folder / "studies")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "ProcessPool", Here)
        assert run_study(study, folder / "results", progress=False) == 0
    return folder


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    shutil.copytree(root, tmp_path / "root")
    return tmp_path / "root"


def rows(root: Path) -> list[dict]:
    return Store(root / "results" / "tiny" / "main").rows()


def test_rows_carry_the_rule_and_what_later_questions_need(root):
    study = load_study("tiny", root / "studies")
    assert len(rows(root)) == 6
    for one in rows(root):
        assert (one["study"], one["rule"]) == ("tiny", study.rule_hash)
        assert [profile["step"] for profile in one["profiles"]] == [0, 3, 6, 9, 12]
        assert len(one["profiles"][-1]["effective_rank"]) == 3
        assert len(one["curve"]["mean"]) == one["steps"] == 12
        assert one["sensitivity"] > 0
        assert (one["spikes"], one["skipped"], one["diverged"]) == (0, 0, None)


def test_verdicts_follow_from_the_rows(root):
    study = load_study("tiny", root / "studies")
    found = judge_claims(study, root / "results")
    values = {(one["scheme"], one["seed"]): one["value"] for one in rows(root)}
    mean = sum(values["pre", k] - values["post", k] for k in range(3)) / 3
    assert found["gap"].estimate == pytest.approx(mean)
    assert (found["gap"].verdict, found["gap"].seeds) == ("reproduced", 3)
    # None of three: the share may be up to 1 - 0.05^(1/3) = 0.63, more than the margin of one half.
    assert (found["never"].verdict, found["never"].estimate) == ("open", 0.0)
    assert found["never"].high == pytest.approx(1 - 0.05 ** (1 / 3))


def test_nothing_is_run_twice(copy):
    before = (copy / "results/tiny/main/rows.jsonl").read_bytes()
    assert run_study(load_study("tiny", copy / "studies"), copy / "results", progress=False) == 0
    assert (copy / "results/tiny/main/rows.jsonl").read_bytes() == before


@pytest.mark.full
def test_a_study_goes_on_where_it_was(copy):
    path = copy / "results/tiny/main/rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]))
    shutil.rmtree(copy / "results/tiny/main/runs")
    study = load_study("tiny", copy / "studies")
    about = copy / "results/tiny/study.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"left": 2}))
    found = judge_claims(study, copy / "results")["gap"]
    assert (found.verdict, found.ours, found.notes) == ("unfinished", "", ("2 of 6 runs have not ended",))
    # More seeds are no other rule.
    file = copy / "studies/tiny.toml"
    file.write_text(file.read_text().replace("seeds = 3", "seeds = 4"))
    study = load_study("tiny", copy / "studies")
    assert run_study(study, copy / "results", progress=False) == 0
    assert path.read_text().splitlines(keepends=True)[:4] == lines[:4]
    # Another run of the same seed gives the same result, whenever it is made.
    again = {one["run"]: one["value"] for one in rows(copy)}
    assert len(again) == 8
    assert again.items() >= {one["run"]: one["value"] for one in map(json.loads, lines)}.items()
    found = judge_claims(study, copy / "results")["gap"]
    assert (found.verdict, found.seeds) == ("reproduced", 4)


@pytest.mark.full
def test_results_and_data_may_be_carried_to_another_machine(tmp_path, capsys):
    """Slices on rented machines: rows come back without checkpoints, and the data lie elsewhere next time."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    text = write_text(here / "text")
    names = {name: [path.name] for name, path in (("data", text), ("val_data", held_out(text)))}
    folder = write_study(tmp_path / "studies", **names)
    options = {"minutes": None, "overrides": {}, "command": ["normlab", "study"]}
    study = load_study("tiny", folder)
    assert command.run([study], here / "results", data_dir=text.parent, **options) == 0
    before = (here / "results/tiny/main/rows.jsonl").read_bytes()
    shutil.copytree(here / "results", there / "results", ignore=shutil.ignore_patterns("runs"))
    shutil.copytree(here, there / "texts", ignore=shutil.ignore_patterns("results"))
    shutil.rmtree(here)
    file = folder / "tiny.toml"
    file.write_text(file.read_text().replace("seeds = 3", "seeds = 4"))
    assert command.run([load_study("tiny", folder)], there / "results", data_dir=there / "texts", **options) == 0
    after = (there / "results/tiny/main/rows.jsonl").read_bytes()
    assert after.startswith(before)
    assert len(after.splitlines()) == 8
    assert str(tmp_path).encode() not in after
    assert "gap: reproduced" in capsys.readouterr().out
    with pytest.raises(NormLabError, match="there is no folder"):
        command.run([study], there / "results", data_dir=tmp_path / "nowhere", **options)


def test_several_studies_share_the_time_and_the_processes(tmp_path, monkeypatch, capsys):
    studies = [load_study(write_study(tmp_path / name).joinpath("tiny.toml").as_posix()) for name in "abc"]
    calls, clock = [], [100.0]

    def run_for_two_minutes(study, results, *, minutes, executor, **options):
        calls.append((study, round(minutes, 6), executor))
        clock[0] += 120.0
        return 0

    monkeypatch.setattr(command.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("normlab.studies.run.run_study", run_for_two_minutes)
    left = command.run(studies, tmp_path / "results", minutes=3.0, overrides={}, command=[])
    assert [(study, minutes) for study, minutes, _ in calls] == [(studies[0], 3.0), (studies[1], 1.0)]
    assert calls[0][2] is calls[1][2]
    # The third has not begun: all its runs are left, and nothing is written for it.
    assert left == sum(size.runs for size in study_plan(studies[2])) > 0
    assert not (tmp_path / "results").exists()
    assert f"{left} runs left" in capsys.readouterr().out


def test_a_rule_changed_afterwards_voids_the_rows(copy):
    path = copy / "studies/tiny.toml"
    path.write_text(path.read_text().replace("by = 2.0", "by = 3.0"))
    study, stored = load_study("tiny", copy / "studies"), (copy / "results/tiny/main/rows.jsonl").read_bytes()
    with pytest.raises(NormLabError, match="rule of tiny has changed since 6 rows") as error:
        run_study(study, copy / "results", progress=False)
    assert "\n" not in str(error.value)
    found = judge_claims(study, copy / "results")["gap"]
    assert found.verdict == "open"
    assert "refused" in found.notes[0]
    # Kept on disk, and good again once the rule is put back.
    assert (copy / "results/tiny/main/rows.jsonl").read_bytes() == stored
    path.write_text(path.read_text().replace("by = 3.0", "by = 2.0"))
    assert judge_claims(load_study("tiny", copy / "studies"), copy / "results")["gap"].verdict == "reproduced"


def test_the_report_is_made_of_rows_alone(root, tmp_path):
    found = report.claim_lines(root / "studies", root / "results")
    text = report.markdown(found)
    assert "2 claims: 1 reproduced, 1 open." in text
    assert "2×16 for 1.54k tokens, 6 rows, cpu" in text.lower()
    assert text == report.markdown(report.claim_lines(root / "studies", root / "results"))
    page = report.claims_page(found)
    assert "Headline results" in page
    # Without the 5 MB that draw other pages' plots.
    assert len(page) < 100_000
    assert "reproduced" in page


def test_readme_and_cards_have_verdicts_alone(root, tmp_path):
    numbered = TINY.replace('"gap"', '"gap"\nnumber = 16').replace('"never"', '"never"\nnumber = 6')
    shutil.copytree(root / "results", tmp_path / "results")
    write_study(tmp_path / "studies", numbered)
    write_study(tmp_path / "studies", numbered, name="later")
    found = report.claim_lines(tmp_path / "studies", tmp_path / "results")
    table = summary.found_table(found)
    assert table.endswith("| [1 reproduced (of 2 parts)](docs/claims.md#tiny) |")
    line = found[0]
    refuted = dataclasses.replace(line, finding=dataclasses.replace(line.finding, verdict="refuted"))
    assert "[1 refuted](docs/claims.md#later) |" in summary.found_table([refuted])
    assert summary.refuted_list([line, refuted]) == f"- {line.claim.claim} ([later](#later))"
    assert "## What was refuted" in report.markdown([refuted])
    assert "## What was refuted" not in report.markdown([line])
    assert "not run" not in table
    assert "Peri-LN uses its depth best" not in table
    assert "| 15 | Peri-LN uses its depth best |  |  |" in summary.results_table(found)
    lines = citations.page_lines(found, "pre")
    assert [line[:12] for line in lines["subject"]] == ["✓ reproduced", "? open: Pre-"]
    assert "(../claims.md#tiny)" in lines["subject"][0]
    assert "Ours: " in lines["subject"][0]
    (run,) = (line for line in found if line.finding.verdict == "reproduced")
    many = dataclasses.replace(run, finding=dataclasses.replace(run.finding, parts=(run.finding,) * 4))
    assert "Ours: " not in citations.page_lines([many], "pre")["subject"][0]
    assert lines["compared"] == []
    # Post-Norm is what Pre-Norm is compared with in one of them: nothing is claimed of it.
    assert citations.page_lines(found, "post") == {"subject": [], "compared": lines["subject"][:1]}
    assert [(claim.mark, claim.schemes) for claim in citations.cited(found)] == [
        ("✓", {"pre": "subject", "post": "compared"}), ("?", {"pre": "subject"}),
    ]  # fmt: skip
    unrun = report.claim_lines(tmp_path / "studies", tmp_path / "nothing")
    assert summary.found_table(unrun) == "No study has been run yet ([all claims](docs/claims.md))."
    assert citations.page_lines(unrun, "pre") == {"subject": [], "compared": []}
    assert citations.cited(unrun) == []


def test_a_scheme_is_named_without_options_and_arm_and_is_a_subject_before_it_is_compared():
    table = {"kind": "bound", "scheme": "pre@no-decay", "against": "pre@decay", "also": ["peri(step=0.1)"]}
    rule, study = read_rule({**table, "at_least": 1.0}, "a rule"), read_study("tiny", tomllib.loads(TINY), "tiny")
    assert citations.roles(study, rule) == {"pre": "subject", "peri": "subject"}


@pytest.mark.parametrize(
    ("value", "arms", "expected"),
    [
        # The whole experiment: the schemes that the settings of these arms name, if any.
        ("disagreements", ["named"], {"post": "subject", "ngpt": "subject"}),
        ("disagreements", ["usual"], {}),
        # One of its numbers: the schemes in its path, whatever else is simulated.
        ("result.verdicts.ngpt(alpha=1.0): tail.measured", ["named"], {"ngpt": "subject"}),
        (
            "result.verdicts.peri: tail.measured / result.verdicts.post: tail.measured",
            ["usual"],
            {"peri": "subject", "post": "compared"},
        ),
    ],
)
def test_an_experiment_is_evidence_on_the_schemes_that_it_is_asked_about(value, arms, expected):
    text = """
        kind = "simulate"
        title = "t"
        cost = "c"
        arms.named = {experiment = "speed-laws", scheme = ["post", "ngpt(alpha=0.5)"]}
        arms.usual = {experiment = "speed-laws"}
        arms.plain = {scheme = ["mix"]}
        claims = [{name = "n", claim = "c", source = "s", theirs = "t", rule = RULE}]
    """
    rule = {"kind": "bound", "scheme": "speed-laws", "value": value, "at_most": 1.0, "exact": True, "arms": arms}
    inline = ", ".join(f"{key} = {json.dumps(entry)}" for key, entry in rule.items())
    study = read_study("tiny", tomllib.loads(text.replace("RULE", f"{{{inline}}}")), "tiny")
    assert citations.roles(study, study.claims[0].rule) == {"speed-laws": "subject", **expected}


def test_what_a_file_says_is_text_on_the_page(tmp_path):
    evil = TINY.replace('claim = "Pre-Norm never', 'claim = "<script>alert(1)</script> | *b* Pre-Norm never')
    found = report.claim_lines(write_study(tmp_path / "studies", evil), tmp_path / "results")
    assert "<script>alert" not in report.claims_page(found)
    assert "<script>" not in report.markdown(found)
    assert "| \\*b\\*" in report.markdown(found)


def test_the_command_lists_plans_and_reports(root, capsys, tmp_path):
    command.show_list(root / "studies", root / "results")
    assert "2 claims: 1 reproduced, 1 open" in capsys.readouterr().out
    command.show_plans([load_study("tiny", root / "studies")], {})
    assert "in all: 6 runs" in capsys.readouterr().out
    command.write_report(root / "studies", root / "results", tmp_path / "claims.md", tmp_path / "claims.html")
    assert (tmp_path / "claims.md").read_text().startswith("# Claims")
    command.write_pages([load_study("tiny", root / "studies")], root / "results")
    assert f"page: {root / 'results/tiny/main/report.html'}" in capsys.readouterr().out
    assert "<h1>" in (root / "results/tiny/main/report.html").read_text()
    command.show_list(root / "studies", tmp_path / "nothing")
    assert "2 not run" in capsys.readouterr().out


def test_a_plan_counts_the_vocabulary_of_the_tokenizer(root, tmp_path, capsys):
    study = load_study("tiny", root / "studies")
    flops = {name: study_plan(study, {"tokenizer": name})[0].flops for name in ("bytes", "bpe:512", "bpe:4096")}
    assert flops["bytes"] < flops["bpe:512"]
    # Only the head changes: 6 FLOPs a token for each of its weights, one row for each entry.
    (arm,) = study_plan(study, {"tokenizer": "bytes"})
    width = study.settings["dim"]
    assert flops["bpe:4096"] - flops["bpe:512"] == pytest.approx(6 * (4096 - 512) * width * arm.tokens)
    train_bpe(["the quick brown fox jumps over the lazy dog"], 258).save(tmp_path / "words.json")
    command.show_plans([study], {"tokenizer": "words.json"}, tmp_path)
    assert "lower bound" not in capsys.readouterr().out
    command.show_plans([study], {"tokenizer": "gone.json"}, tmp_path)
    assert "FLOPs are a lower bound: the vocabulary of gone.json" in capsys.readouterr().out


def test_time_is_shared_by_the_arms(copy, monkeypatch):
    text = (copy / "studies/tiny.toml").read_text().replace("[[claims]]", "[vary]\nlength = [16, 32]\n[[claims]]", 1)
    study = read_study("other", tomllib.loads(text), "other.toml")
    monkeypatch.setattr("normlab.compare.comparison.compare", lambda *_args, **options: asked.append(options))
    asked: list[dict] = []
    left = run_study(study, copy / "results", minutes=5.0, progress=False)
    assert left == 12
    assert [4.5 < options["minutes"] <= 5.0 for options in asked] == [True, True]
    with pytest.raises(NormLabError, match="minutes must be positive"):
        run_study(study, copy / "results", minutes=0.0, progress=False)


def test_the_arms_share_their_processes(copy, monkeypatch):
    """A process that compiled a model for one arm has it for the next."""
    text = (copy / "studies/tiny.toml").read_text().replace("seeds = 3", "seeds = 1")
    text = text.replace("[[claims]]", "[vary]\nweight_decay = [0.0, 0.1]\n[[claims]]", 1)
    study = read_study("other", tomllib.loads(text), "other.toml")
    made: list[Here] = []

    class Counted(Here):
        def __init__(self, places):
            super().__init__(places)
            made.append(self)

    monkeypatch.setattr(executor, "ProcessPool", Counted)
    assert run_study(study, copy / "results", progress=False) == 0
    assert len(made) == 1
    assert len(list((copy / "results/other").glob("*/rows.jsonl"))) == 2


# -- other kinds of work -------------------------------------------------------------------------------------------


def test_a_check_is_a_row(tmp_path):
    rule = 'kind = "bound"\nscheme = "pre"\nvalue = "result.ladder.profiles.0.rms.max"\nat_most = 100.0\nexact = true'
    settings = 'targets = ["pre", "post"]\ndepths = [2]\nsteps = 2\nlength = 8\nbatch_size = 2\nwidth = 16'
    study = other("check", settings, rule)
    assert run_study(study, tmp_path, progress=False) == 0
    assert [one["scheme"] for one in running.StudyRecord(study, tmp_path / "other").rows()["main"]] == ["pre", "post"]
    found = judge_claims(study, tmp_path)["it"]
    assert (found.verdict, found.power) == ("reproduced", "computed, not sampled")
    assert (tmp_path / "other/main/rows.jsonl").stat().st_size < 200_000


def test_a_simulation_has_a_row_for_every_scheme(tmp_path):
    rule = 'kind = "bound"\nscheme = "peri"\nvalue = "result.bands.gamma.mean.-1"\nat_least = -1.0\nexact = true'
    study = other("simulate", 'scheme = ["post", "peri"]\ntokens = 4\ndim = 3\ntime = 0.2', rule)
    assert run_study(study, tmp_path, progress=False) == 0
    stored = running.StudyRecord(study, tmp_path / "other").rows()["main"]
    assert [one["scheme"] for one in stored] == ["post", "peri"]


# -- ladders -------------------------------------------------------------------------------------------------------

LADDER = """
kind = "ladder"
title = "A tiny ladder"
cost = "8 runs"

[settings]
schemes = ["pre", "post"]
sizes = ["2x16", "2x32"]
budgets = [768, 1536]
seeds = 1
hold_out = false
lrs = [1e-2]
warmup_steps = 2
head_width = 8
workers = 1
length = 32
batch = 4
device = "cpu"
evals = 2
eval_tokens = 600
saves = 0
epochs = 100.0
"""


@pytest.mark.full
def test_a_ladder_is_a_study_and_its_cells_are_arms(tmp_path):
    text = write_text(tmp_path / "text")
    rule = 'kind = "bound"\nscheme = "pre"\nvalue = "loss"\nat_most = 100.0\nexact = true\narms = ["2x32,1.54k"]'
    write_study(tmp_path / "studies", LADDER + CLAIM + rule, data=[str(text)], val_data=[str(held_out(text))])
    study = load_study("tiny", tmp_path / "studies")
    assert sum(size.runs for size in running.study_plan(study)) == 8
    assert run_study(study, tmp_path / "results", progress=False) == 0
    stored = rows_in(tmp_path / "results/tiny/main")
    assert {one["rule"] for one in stored} == {study.rule_hash}
    assert {(one["size"], one["budget"]) for one in stored} == {(s, b) for s in ("2x16", "2x32") for b in (768, 1536)}
    found = judge_claims(study, tmp_path / "results")["it"]
    assert (found.verdict, found.runs) == ("reproduced", 1)
    # The same rows, made by `normlab ladder` and read by a study of rows.
    other_study = other("rows", "", rule, head=f'rows = ["{tmp_path / "results/tiny/main"}"]')
    assert run_study(other_study, tmp_path / "again", progress=False) == 0
    assert judge_claims(other_study, tmp_path / "again")["it"].ours == found.ours


def test_runs_that_a_ladder_has_set_aside_are_no_evidence(copy):
    """A rate that moved leaves rows behind, at which a seed would count twice."""
    study, arm = load_study("tiny", copy / "studies"), copy / "results/tiny/main"
    first = rows(copy)[0]["run"]
    (arm / "ladder.json").write_text(json.dumps({"design": {"set_aside": [first]}}))
    stored = running.StudyRecord(study, copy / "results/tiny").rows()["main"]
    assert (len(stored), first in {one["run"] for one in stored}) == (5, False)


def rows_in(folder: Path) -> list[dict]:
    return Store(folder).rows()
