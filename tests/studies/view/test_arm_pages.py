"""Pages of the arms of a study, from stored rows: what was measured, and the command that computes it again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from normlab.dynamics import command
from normlab.errors import NormLabError
from normlab.studies.items import simulation_config
from normlab.studies.record import StudyRecord
from normlab.studies.run import run_study
from normlab.studies.study import RESULTS, load_study
from normlab.studies.view.arm_pages import write_arm_pages
from normlab.studies.view.stored_simulation import NOTE, simulate_command, stored_result
from tests.command import normlab
from tests.studies.rows import other

ROOT = Path(__file__).parents[3]
SIMULATIONS = ("attention-dynamics", "attention-limits")
RULE = 'kind = "bound"\nscheme = "post"\nvalue = "result.bands.cosine.mean.-1"\nat_least = 0.0\nexact = true'
SETTINGS = "looks = 4\nshown = 0\nbins = 0\ntokens = 8\ndim = 8\ndevice = 'cpu'\n[arms.free]\nscheme = ['post', 'peri']"
EXPERIMENT = "[arms.laws]\nexperiment = 'speed-laws'\nscheme = ['post']"


def test_a_page_is_what_the_simulation_had_found(tmp_path, monkeypatch):
    study = other("simulate", f"{SETTINGS}\n{EXPERIMENT}", RULE)
    seen = {}
    monkeypatch.setattr(command, "simulate", lambda was=command.simulate, **options: seen.setdefault(0, was(**options)))
    assert run_study(study, tmp_path, progress=False) == 0
    rows = StudyRecord(study, tmp_path / "other").rows()
    found = stored_result(study, "free", rows["free"])
    assert found.config == seen[0].config
    assert [run.scheme for run in found.runs] == ["post", "peri"]
    assert found.runs[1].bands["cosine"].mean == pytest.approx(seen[0].runs[1].bands["cosine"].mean, rel=1e-5)
    pages = {path.parent.name: path.read_text() for path in write_arm_pages(study, tmp_path)}
    assert "Tokens through the layers under post and peri" in pages["free"]
    assert "normlab simulate --looks 4 --tokens 8 --dim 8 --device cpu --scheme post,peri --html" in pages["free"]
    assert "All 3 predictions hold." in pages["laws"]
    assert NOTE in pages["laws"]
    assert "figures-title" not in pages["laws"]


@pytest.mark.parametrize("name", SIMULATIONS)
def test_the_command_of_an_arm_computes_the_arm(name, monkeypatch):
    asked: list = []
    monkeypatch.setattr(command, "run_command", lambda *given, **_: asked.append(given) or exit(0))
    study = load_study(name, ROOT / "studies")
    for arm in study.arms:
        settings = study.settings_of(arm)
        assert normlab(*simulate_command(settings)[1:]).returncode == 0
        experiment, config = asked.pop()
        drawn = {"shown": config.shown, "bins": config.bins}
        expected = simulation_config(study, settings)
        assert (experiment, config) == (expected[0], expected[1].replace(**drawn))


@pytest.mark.parametrize("name", SIMULATIONS)
def test_every_simulation_of_the_repository_has_its_page(name, tmp_path):
    shutil.copytree(ROOT / RESULTS / name, tmp_path / name, ignore=shutil.ignore_patterns("report.html"))
    study = load_study(name, ROOT / "studies")
    pages = [*write_arm_pages(study, tmp_path)]
    assert {path.parent.name for path in pages} == {*study.arms}
    assert all(path.stat().st_size > 10_000 for path in pages)


def test_without_rows_or_pages_it_says_so(tmp_path):
    with pytest.raises(NormLabError, match="other has no rows in"):
        [*write_arm_pages(other("simulate", SETTINGS, RULE), tmp_path)]
    with pytest.raises(NormLabError, match="is of kind rows, whose arms have no pages"):
        [*write_arm_pages(other("rows", "", RULE), tmp_path)]
