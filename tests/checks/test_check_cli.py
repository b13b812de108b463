"""`normlab check` as a person or a CI job meets it: card, files, exit codes, one line for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from normlab.checks.coordinates.records import CoordinateCheck
from normlab.checks.result import Check
from normlab.checks.view.side_by_side import Against
from normlab.cli import main
from normlab.train.transfer import Transfer
from tests.matrix import parametrize

QUICK = ["--steps", "2", "--width", "16", "--length", "8", "--batch-size", "2", "--start-size", "tiny"]


@pytest.fixture
def normlab(monkeypatch, capsys):
    """Run the command in this process: exit code, standard output, standard error."""

    def run(*words: str):
        monkeypatch.setattr(sys, "argv", ["normlab", *words])
        try:
            main.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    return run


def test_help_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['normlab', 'check', '--help']\n"
        "from normlab.cli import main\n"
        "try: main.main()\n"
        "except SystemExit as stop: assert stop.code in (0, None)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    for flag in ("--depths", "--lr-ladder", "--shrink", "--max-seconds", "--fail-on", "--against", "--json", "--html"):
        assert flag in found.stdout


def test_card_and_files(normlab, tmp_path):
    record, page = tmp_path / "check.json", tmp_path / "check.html"
    # Lists are one word: the target may come after them.
    code, out, _ = normlab("check", "--depths", "2,3", *QUICK, "--json", str(record), "--html", str(page), "pre")
    assert code == 0
    check = Check.from_json(record.read_text("utf-8"))
    assert check.ladder.depths == (2, 3)
    assert check.target.name == "pre"
    assert check.command[:2] == ("normlab", "check")
    assert "pre" in out
    assert str(record) in out
    assert "</html>" in page.read_text("utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check.html", "check.json"]


def test_two_targets_side_by_side(normlab, tmp_path):
    record = tmp_path / "both.json"
    code, out, _ = normlab("check", "pre", "--against", "post", "--depths", "2,3", *QUICK, "--json", str(record))
    assert code == 0
    both = Against.from_dict(json.loads(record.read_text("utf-8")))
    assert [check.target.name for check in both.checks] == ["pre", "post"]
    assert "post" in out


@parametrize(
    ("fail_on", "code"),
    [("exploding", 1), ("collapse", 0), ("any", 1), ("vanishing,exploding", 1), ("", 0)],
    quick=["exploding", "collapse"],
)
def test_exit_code_follows_fail_on(normlab, fail_on, code):
    # Without any norm, sixteen-fold gains at a rate of 10 break within two steps.
    options = ["--depths", "2,3", *QUICK[2:], "--steps", "6", "--lr", "1e6"]
    found, out, err = normlab("check", "none", *options, f"--fail-on={fail_on}")
    assert found == code, out + err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["peery"], "peri"),
        (["peri(step=7)"], "step must lie in (0, 1], got 7"),
        (["pre", "--depths", "6,6"], "different whole numbers"),
        (["pre", "--depths", "six"], "different whole numbers from 2 on, got six"),
        (["pre", "--depths", "6,x"], "got 6,x"),
        (["pre", "--widths", "1.5"], "got 1.5"),
        (["pre", "--max-seconds", "-1"], "positive number"),
        (["peri("], "cannot read scheme 'peri('"),
        (["peri(stp=1)"], "'step'"),
        ([""], "no target was named"),
        (["pre", "--data", "nowhere.txt"], "nowhere.txt"),
        (["pre", "--device", "qpu"], "try cpu"),
        (["pre", "--fail-on", "explodes"], "exploding"),
        (["pre", "--json", "check.txt"], "must end in .json"),
        (["pre", "--html", "nowhere/at/all.html"], "not a folder"),
        (["pre", "--against", "postt", "--depths", "2,3"], "post"),
        (["no.such.module:factory"], "no.such.module"),
        (["math:pi"], "math:pi"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_mistakes_get_one_line_and_exit_code_2(normlab, words, message):
    code, out, err = normlab("check", *words, *QUICK)
    assert code == 2
    assert message in err
    assert not out
    assert len(err.strip().splitlines()) == 1, err


def test_a_factory_that_raises_is_one_line(normlab, tmp_path, monkeypatch):
    (tmp_path / "broken_factory.py").write_text(
        textwrap.dedent("""
            def build(depth, width):
                raise ZeroDivisionError("no model today")
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, _, err = normlab("check", "broken_factory:build", *QUICK)
    assert code == 2
    assert "no model today" in err
    assert len(err.strip().splitlines()) == 1


def test_a_mistake_in_the_second_target_is_found_before_the_first_is_checked(normlab, monkeypatch):
    from normlab.checks import check as checks

    monkeypatch.setattr(checks, "depth_ladder", lambda *_, **__: pytest.fail("work was begun"))
    assert normlab("check", "pre", "--against", "postt", *QUICK)[0] == 2


def test_control_c_ends_it_cleanly(normlab, monkeypatch):
    from normlab.checks import ladders

    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(ladders, "burst", interrupted)
    code, out, err = normlab("check", "pre", *QUICK)
    assert (code, out) == (130, "")
    assert err.strip() == "normlab: stopped"


def test_json_has_no_numbers_that_json_has_not(normlab, tmp_path):
    record = tmp_path / "check.json"
    normlab("check", "none", "--depths", "2,3", *QUICK, "--lr", "1e6", "--json", str(record))

    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    json.loads(record.read_text("utf-8"), parse_constant=refuse)


# -- coordinate checks -------------------------------------------------------------------------------------------------

COORDINATES = ["check", "pre", "--coordinates", "--steps", "1", "--length", "8", "--batch-size", "2", "--depths", "2"]


def test_a_coordinate_check_and_its_files(normlab, tmp_path):
    record, page = tmp_path / "found.json", tmp_path / "found.html"
    code, out, _ = normlab(*COORDINATES, "--widths", "16,32", "--json", str(record), "--html", str(page))
    assert code == 0
    found = CoordinateCheck.from_json(record.read_text("utf-8"))
    assert [(axis.name, axis.sizes, axis.fixed) for axis in found.axes] == [("width", (16, 32), 2)]
    assert found.command[:2] == ("normlab", "check")
    assert "Over width" in out
    assert str(record) in out
    assert "</html>" in page.read_text("utf-8")


def test_a_broken_rule_ends_a_coordinate_check_with_1(normlab, monkeypatch):
    monkeypatch.setattr(Transfer, "rates", lambda _self, model, _rule="adamw": dict.fromkeys(_names(model), 1.0))
    code, out, _ = normlab(*COORDINATES, "--widths", "32,128", "--base-dim", "32")
    assert code == 1
    assert "The transfer rules do not hold" in out


def _names(model):
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "pre", "--coordinates", "--against", "post"], "leave out --against"),
        (["check", "pre", "--base-dim", "64"], "add --coordinates"),
        (["check", "pre", "--coordinates", "--widths", "32", "--depths", "2"], "expected two of either"),
    ],
)
def test_coordinate_checks_refuse_in_one_line(normlab, words, message):
    code, _, err = normlab(*words)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err
