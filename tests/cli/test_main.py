"""The command line as a person meets it: help at once, one line for a mistake, the card and the table."""

from __future__ import annotations

import ast
import contextlib
import errno
import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import normlab
from normlab.cli import main
from normlab.cli.defaults import value_of
from tests.command import normlab as run
from tests.matrix import parametrize


def test_help_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['normlab', '--help']\n"
        "from normlab.cli import main\n"
        "try: main.main()\n"
        "except SystemExit as stop: assert stop.code in (0, None)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "normlab schemes geonorm" in found.stdout


def test_a_warning_about_files_is_one_line():
    torn = UserWarning("rows.jsonl: the last line is torn")
    assert main._in_one_line(torn, UserWarning, main.__file__, 3) == "normlab: rows.jsonl: the last line is torn\n"
    # Of another package it keeps its place.
    assert "/other/code.py:3: UserWarning" in main._in_one_line(torn, UserWarning, "/other/code.py", 3)


def test_table_names_every_scheme():
    found = run("schemes")
    assert found.returncode == 0, found.stderr
    assert all(name in found.stdout for name in normlab.list_schemes())


def test_card_says_what_was_asked_for():
    found = run("schemes", "peri(step=0.1)")
    assert found.returncode == 0, found.stderr
    for word in ("Peri-LN", "arXiv 2502.02732", "Certificate", "vectors a token and block", "Fails", "0.1"):
        assert word in found.stdout


def test_card_cites_claims_by_the_role_of_the_scheme(tmp_path, monkeypatch):
    """Also away from a checkout, whose studies and rows no installed package has."""
    monkeypatch.chdir(tmp_path)
    own, _, others = run("schemes", "post").stdout.partition("Claims on schemes compared with it")
    assert "tokens meet in one point under all six laws. (attention-dynamics)" in own
    assert "GeoNorm reaches a lower loss than Post-Norm at 125M on books" in others
    assert "Claims" not in run("schemes", "keel").stdout


def test_json_is_json():
    cards = json.loads(run("schemes", "--json").stdout)
    assert [card["name"] for card in cards] == normlab.list_schemes()
    one = json.loads(run("schemes", "sandwich", "--json").stdout)
    assert one == next(card for card in cards if card["name"] == "peri")
    assert {"study", "mark", "verdict", "claim", "schemes"} == one["claims"]["subject"][0].keys()
    assert json.loads(run("doctor", "--json").stdout)["kernels"]["reference"].startswith("usable")


def test_doctor_says_why_not():
    found = run("doctor")
    assert found.returncode == 0, found.stderr
    assert "kernels triton" in found.stdout
    assert "torch" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("schemes", "peery"), "did you mean 'peri'"),
        (("schemes", "peri(step=3)"), "step must lie in (0, 1], got 3"),
        (("schemes", "peri(oops"), "cannot read scheme"),
        (("schemes", "--jsn"), "--json"),
    ],
    ids=" ".join,
)
def test_mistakes_get_exit_code_2_and_no_traceback(arguments, message):
    found = run(*arguments)
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    assert message in found.stderr + found.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "Expected one of {schemes, train, "),
        (("train", "--shceme", "peri"), "Unrecognized options: --shceme, peri; did you mean --scheme? normlab train"),
        (("train", "--depth", "three"), "Error parsing --depth: 'three' is not a whole number; normlab train --help"),
        (("simulate", "--beta", "hot"), "Error parsing --beta: 'hot' is not a number; normlab simulate --help"),
        (("train", "--betas", "0.9"), "Missing value for argument '--betas'. Expected 2 values; normlab train --help"),
        (("export", "runs/peri"), "Missing from normlab export: DIR; normlab export --help lists all options"),
        (("completion",), "Missing from normlab completion: {bash,zsh,fish}; normlab completion --help lists all"),
        (
            ("check", "pre", "--shrink", "x"),
            "Error parsing --shrink: expected {None}|INT, got 'x'; normlab check --help",
        ),
        (("bench", "step", "--mode", "x"), "Unrecognized options: --mode, x; "),
        (("completion", "bsh"), "Invalid choice 'bsh' for argument 'shell'. Expected one of ('bash', 'zsh', 'fish')"),
        (("--hepl",), "Unrecognized options: --hepl; normlab --help lists all options"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
@pytest.mark.parametrize("columns", [60, 200])
def test_a_mistyped_option_is_one_line_with_the_nearest_of_its_verb(arguments, line, columns):
    found = run(*arguments, columns=columns)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith(f"normlab: {line}")
    assert found.stderr.count("\n") == 1


def test_a_verb_without_options_has_no_flag():
    assert value_of([], "--toml") is None
    assert value_of(["--toml"], "--toml") is None
    assert value_of(["--toml", "a", "--toml=b"], "--toml") == "b"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("exprt", "runs/peri", "model"), "unknown verb 'exprt'; did you mean 'export'? known: bench, check, "),
        (("schemas",), "unknown verb 'schemas'; did you mean 'schemes'? known: bench, check, "),
        (("Train", "--help"), "unknown verb 'Train'; did you mean 'train'? known: bench, check, "),
        (("xyzzy",), "unknown verb 'xyzzy'; known: bench, check, "),
        (("",), "unknown verb ''; known: bench, check, "),
        (("bench", "kernals"), "unknown benchmark 'kernals'; did you mean 'kernels'? known: grid, kernels, step"),
    ],
    ids=["export", "schemes", "capital", "nothing near", "empty", "bench"],
)
def test_a_mistyped_verb_is_one_line_with_the_nearest(arguments, line):
    found = run(*arguments)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith(f"normlab: {line}")
    assert found.stderr.count("\n") == 1


@parametrize(
    "arguments",
    [
        ("train", "--out", ""), ("train", "--out="), ("compare", "--out", ""), ("check", "pre", "--json", ""),
        ("simulate", "--html="), ("simulate", "speed-laws", "--json", ""), ("bench", "kernels", "--out", ""),
        ("train", "--toml", ""), ("generate", "--run", ""), ("train", "--branch-from", ""),
    ],
    quick=[("train", "--out="), ("check", "pre", "--json", ""), ("train", "--branch-from", "")],
    ids=" ".join,
)  # fmt: skip
def test_an_empty_path_is_refused(arguments, tmp_path):
    command = [sys.executable, "-W", "error", "-m", "normlab.cli.main", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert found.returncode == 2
    assert re.fullmatch(r"normlab: --[a-z-]+ is empty; expected a path; .*\n", found.stderr)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments", [("watch", "", "--once"), ("report", ""), ("export", "runs/peri", ""), ("eval", "a", "")], ids=" ".join
)
def test_an_empty_path_without_a_flag_is_refused(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run(*arguments)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == f'normlab: a path of {arguments[0]} is empty; name it, or write "." for this folder\n'
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("folders", "line"),
    [
        (("a", "b c"), "takes one folder, got 2; make a page of each: normlab report a; normlab report 'b c'"),
        ((), "needs a folder made by normlab compare, ladder or train, and none is named"),
    ],
)
def test_a_report_of_several_folders_says_what_to_type(folders, line):
    found = run("report", *folders)
    assert (found.returncode, found.stdout, found.stderr) == (2, "", f"normlab: normlab report {line}\n")


@parametrize(
    "arguments",
    [
        ("train", "--val-data"), ("train", "--val_data", "--lr", "1e-3"), ("compare", "--schemes", "--lrs", "1e-3"),
        ("ladder", "--target", "--dry-run"), ("study", "high-rates", "--val-data"), ("eval", "runs/a", "--bits"),
    ],
    quick=[("train", "--val_data", "--lr", "1e-3"), ("study", "high-rates", "--val-data")],
    ids=" ".join,
)  # fmt: skip
def test_a_list_without_a_value_is_refused(arguments):
    """`--val-data` alone meant what leaving it out means: a fraction of the training data."""
    found = run(*arguments)
    assert (found.returncode, found.stdout) == (2, "")
    assert re.fullmatch(
        r"normlab: --[a-z-]+ is empty; expected one value or more; leave it out for its default\n", found.stderr
    )


@pytest.mark.parametrize(
    "arguments", [("ladder", "--dry-run", "--minutes", "0"), ("study", "high-rates", "--dry-run", "--minutes", "0")]
)
def test_a_dry_run_refuses_the_time_limit_that_the_run_would(arguments):
    found = run(*arguments)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "normlab: minutes must be positive, got 0.0; leave it out to go on to the end\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("depth = 0", "run.toml: depth must be at least 1, got 0"),
        ("scheme = 'pery'", "run.toml: unknown scheme 'pery'; did you mean 'peri'?"),
        ("out = ''", "run.toml: --out is empty; expected a path"),
    ],
)
def test_a_setting_that_cannot_be_is_blamed_on_its_file(line, message, tmp_path):
    (tmp_path / "run.toml").write_text(line)
    found = run("train", "--toml", str(tmp_path / "run.toml"))
    assert found.returncode == 2
    assert found.stderr.startswith(f"normlab: {message}")
    assert found.stderr.count("\n") == 1


def test_a_flag_is_not_blamed_on_the_file(tmp_path):
    (tmp_path / "run.toml").write_text("depth = 3")
    found = run("train", "--toml", str(tmp_path / "run.toml"), "--depth", "0")
    assert found.stderr == "normlab: depth must be at least 1, got 0; try 4\n"


@pytest.mark.full
@pytest.mark.parametrize(("fails_on", "code"), [("leaks", 0), ("structure", 1)])
def test_a_reader_that_leaves_takes_no_file_and_no_exit_code_with_it(fails_on, code, tmp_path):
    check = ["check", "none", "--depths", "2,4", "--steps", "1", "--json", "found.json", "--fail-on", fails_on]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        found = subprocess.run(
            [sys.executable, "-m", "normlab", *check], stdout=writing, stderr=subprocess.PIPE, text=True, check=False,
            cwd=tmp_path,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (found.returncode, found.stderr) == (code, "")
    assert json.loads((tmp_path / "found.json").read_text())


class Pipe(io.StringIO):
    """Standard output whose reader has left."""

    name = "<stdout>"

    def __init__(self, file, error):
        super().__init__()
        self._file, self._error = file, error

    def fileno(self):
        return self._file.fileno()

    def write(self, text):
        raise OSError(self._error, os.strerror(self._error))


@pytest.mark.parametrize("verb", ["schemes", "--version"])
def test_a_reader_that_has_left_is_no_error(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["normlab", verb])
    with (tmp_path / "out").open("w") as file, contextlib.redirect_stdout(Pipe(file, errno.EPIPE)):
        main.main()
    assert capsys.readouterr().err == ""


def test_a_run_outlives_the_reader_of_its_progress(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("some text to learn from " * 200)
    sizes = "--tokens 128 --length 16 --batch 2 --depth 1 --dim 8 --heads 1 --evals 1 --eval-tokens 32 --saves 0"
    options = [*sizes.split(), "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["normlab", "train", *options])
    with (
        (tmp_path / "out").open("w") as file,
        contextlib.redirect_stderr(Pipe(file, errno.EPIPE)),
        pytest.raises(SystemExit, match="0"),
    ):
        main.main()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "done"


def stop(words: list[str]) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("ends", "code"), [(main.run, "2"), (stop, "130")])
def test_an_error_keeps_its_exit_code_when_its_reader_has_left(ends, code, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["normlab", "no-such-verb"])
    monkeypatch.setattr(main, "run", ends)
    with (
        (tmp_path / "out").open("w") as file,
        contextlib.redirect_stderr(Pipe(file, errno.EPIPE)),
        pytest.raises(SystemExit, match=code),
    ):
        main.main()


@pytest.mark.parametrize("verb", ["schemes", "--version"])
def test_output_that_cannot_be_written_is_one_line(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["normlab", verb])
    with (
        (tmp_path / "out").open("w") as file,
        contextlib.redirect_stdout(Pipe(file, errno.ENOSPC)),
        pytest.raises(SystemExit, match="2"),
    ):
        main.main()
    assert capsys.readouterr().err == "normlab: cannot write to <stdout>: No space left on device\n"


def test_version():
    assert run("--version").stdout == f"normlab {normlab.__version__}\n"


@pytest.mark.parametrize(
    "words", [[name] for name in main._VERBS if name != "bench"] + [["bench", name] for name in main._BENCHES]
)
def test_every_help_has_an_example(words):
    found = run(*words, "--help")
    assert found.returncode == 0
    assert re.search(rf"For example:\n  .*normlab {' '.join(words)}\b", found.stdout)


def test_the_help_of_all_is_one_paragraph_a_verb():
    shown = run("--help").stdout
    assert all(f"• {verb}" in shown for verb in ("train", "ladder", "bench", "eval"))
    assert "For example:" not in shown
    assert "normlab COMMAND --help" in shown
    assert shown.count("\n") < 75
    assert "--fail-on" in run("check", "--help").stdout


def test_a_line_of_help_breaks_after_a_clause():
    """tyro keeps the line breaks of an attribute's docstring, whatever the width of the terminal."""
    texts = [text for file in Path(normlab.__file__).parent.rglob("config.py") for text in _helps(file)]
    inner = [line for text in texts for line in text.splitlines()[:-1]]
    assert len(inner) > 10
    assert [line for line in inner if line[-1] not in ".,;:"] == []


def _helps(file: Path) -> list[str]:
    """The docstrings of attributes of configurations in a file."""
    classes = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.ClassDef)]
    pairs = [pair for node in classes if node.name.endswith("Config") for pair in itertools.pairwise(node.body)]
    return [
        after.value.value for field, after in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    ]  # fmt: skip
