"""`normlab ladder --rows`: the answer from a table of losses."""

from __future__ import annotations

import inspect
from pathlib import Path

from normlab.cli.ladder import ladder as ladder_verb
from normlab.cli.ladder import ladder_table
from tests.command import normlab as run_command


def test_a_table_from_elsewhere_is_answered(tmp_path: Path) -> None:
    lines = ["scheme,parameters,tokens,flops,seed,loss"]
    for i in range(5):
        for seed in range(3):
            for scheme, gap in (("base", 0.0), ("mine", -0.02)):
                loss = 4.0 - 0.2 * i + 0.001 * seed + gap * (1 + 0.01 * seed)
                lines.append(f"{scheme},{10 * 2**i}M,{100 * 2**i}M,{6e15 * 4**i},{seed},{loss}")
    (tmp_path / "losses.csv").write_text("\n".join(lines) + "\n")
    done = run_command("ladder", "--rows", str(tmp_path / "losses.csv"), "--baseline", "base", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout
    assert (tmp_path / "report.html").is_file()
    wrong = run_command("ladder", "--rows", str(tmp_path / "losses.csv"), "--baseline", "theirs")
    assert wrong.returncode == 2
    assert "its schemes are base, mine" in wrong.stderr


def test_a_table_takes_no_options_of_training() -> None:
    for option in ("--dry-run", "--seeds=3"):
        done = run_command("ladder", "--rows", "losses.csv", option)
        assert done.returncode == 2
        assert f"so it takes no {option.partition('=')[0]}; leave that out" in done.stderr
        assert done.stderr.count("\n") == 1


def test_the_answer_from_a_table_has_a_folder_of_its_own() -> None:
    """README's two commands are given one after the other in the same place."""
    trained, tabled = (inspect.signature(verb).parameters["out"].default for verb in (ladder_verb, ladder_table))
    assert trained != tabled


def test_a_target_within_the_table_is_refused(tmp_path: Path) -> None:
    rows = [f"{name},{n}M,100M,{6e14 * n},0,3.{n}" for name in ("base", "mine") for n in (1, 2, 4)]
    (tmp_path / "losses.csv").write_text("\n".join(["scheme,parameters,tokens,flops,seed,loss", *rows]))
    called = ["ladder", "--rows", str(tmp_path / "losses.csv"), "--out", str(tmp_path / "answer")]
    done = run_command(*called, "--target", "2M:100M")
    assert done.returncode == 2
    assert "target 2M:100M has 0.5 times the compute of 4M, 100M tokens, the top of the ladder" in done.stderr
    assert run_command(*called, "--target", "8M:100M").returncode == 0
