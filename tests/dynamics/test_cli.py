"""`normlab simulate` as a person meets it: help at once, one line for a mistake, a table, a page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import normlab
from normlab import NormLabError
from normlab.dynamics.experiments import EXPERIMENTS
from normlab.dynamics.result import Simulation
from normlab.schemes.contract.law import Law, on_sphere
from tests import command

run = partial(command.normlab, "simulate")


def test_help_lists_the_experiments_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['normlab', 'simulate', 'causal', '--help']\n"
        "from normlab.cli import main\n"
        "try: main.main()\n"
        "except SystemExit as stop: assert stop.code in (0, None)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    for experiment in EXPERIMENTS.values():
        assert f"{experiment.name} " in found.stdout
        assert experiment.about[:30] in found.stdout
    # Help of an experiment shows its own defaults.
    assert "(default: 2048)" in found.stdout


def test_a_free_run_prints_a_table_and_keeps_both_files(tmp_path: Path) -> None:
    page, numbers = tmp_path / "page.html", tmp_path / "run.json"
    options = ("--tokens", "8", "--time", "2", "--looks", "8", "--beta", "5", "--dim", "16", "--heads", "1")
    found = run("--scheme", "peri(step=0.1),post", *options, "--html", str(page), "--json", str(numbers))
    assert found.returncode == 0, found.stderr
    assert "peri(step=0.1)" in found.stdout
    assert "8 tokens in dimension 16" in found.stdout
    assert f"html: {page}" in found.stdout
    kept = Simulation.from_json(numbers.read_text())
    assert [one.scheme for one in kept.runs] == ["peri(step=0.1)", "post"]
    assert kept.command[:2] == ("normlab", "simulate")
    assert "Tokens through the layers under peri(step=0.1) and post" in page.read_text()


def test_a_narrow_terminal_cuts_no_number() -> None:
    found = run("speed-laws", "--scheme", "post,ngpt(alpha=1.0)", columns=80)
    assert found.returncode == 0, found.stderr
    assert "…" not in found.stdout
    assert re.search(r"│ \d\S*e-\d\d ", found.stdout)


def test_an_experiment_has_its_own_defaults_and_flags_change_them(tmp_path: Path) -> None:
    numbers = tmp_path / "result.json"
    # Flags may come first.
    found = run("--tokens", "16", "value-spectrum", "--dim", "8", "--json", str(numbers))
    assert found.returncode == 0, found.stderr
    assert "predictions hold" in found.stdout
    config = json.loads(numbers.read_text())["config"]
    defaults = EXPERIMENTS["value-spectrum"].defaults
    assert (config["tokens"], config["dim"]) == (16, 8)
    assert (config["radius"], config["time"]) == (defaults.radius, defaults.time)
    assert config["scheme"] == list(defaults.scheme)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "1"), "tokens must be a whole number from 2 on, got 1"),
        (("--dim", "1"), "dim must be a whole number from 2 on, got 1"),
        (("--beta", "-1"), "β must be finite and not negative, got -1"),
        (("--time", "nan"), "time must be positive and finite"),
        (("--scheme", "peery"), "did you mean 'peri'"),
        (("sped-laws",), "did you mean 'speed-laws'"),
        (("peri(step=0.1)",), "is a scheme and no experiment; try normlab simulate --scheme"),
        (("--html", "page.txt"), "must end in .html; try page.html"),
        (("--json", "no/such/folder/a.json"), "is not a folder"),
        (("--device", "cuda:77"), "cannot compute on 'cuda:77'"),
        (("--device", "meta"), "cannot compute on 'meta'"),
        (("metastability", "--dim", "3"), "metastability is for the circle"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    found = run(*arguments)
    assert found.returncode == 2, found.stdout
    assert found.stderr.startswith("normlab: ")
    assert found.stderr.count("\n") == 1
    assert message in found.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--weights", "kaming"), "kaiming"), (("--tokens", "many"), "--tokens"), (("--betas", "1"), "--beta")],
)  # fmt: skip
def test_flags_that_cannot_be_read_are_named(arguments: tuple[str, ...], message: str) -> None:
    found = run(*arguments)
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    assert message in found.stderr + found.stdout


def test_progress_stays_off_standard_output() -> None:
    found = run("--tokens", "4", "--time", "1", "--looks", "4")
    assert found.returncode == 0
    assert "simulate:" not in found.stdout
    assert found.stdout.lstrip().startswith("4 tokens")


@pytest.mark.parametrize("late", [False, True])
def test_a_law_that_returns_nan_is_refused_in_one_line(late: bool) -> None:
    def speed(motion):
        bad = torch.full_like(motion.radius, torch.nan)
        return torch.where(motion.time > 1.0, bad, torch.ones_like(bad)) if late else bad

    law = Law(speed=speed, rms=on_sphere, forward="bounded", backward="not known")
    with pytest.raises(NormLabError) as raised:
        normlab.simulate(law, tokens=4, time=3.0, looks=4)
    assert "\n" not in str(raised.value)


def test_the_public_name_is_lazy() -> None:
    code = "import sys, normlab; assert 'torch' not in sys.modules; assert callable(normlab.simulate)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "simulate" in dir(normlab)
