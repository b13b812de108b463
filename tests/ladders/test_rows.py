"""Tables of losses that anyone's runs have filled."""

from __future__ import annotations

from pathlib import Path

import pytest

from normlab.errors import NormLabError
from normlab.ladders.results import build, is_ladder, markdown, read_report
from normlab.ladders.rows import read_table
from normlab.ladders.table import read_losses

HEAD = "scheme,parameters,tokens,flops,seed,loss"


def table(folder: Path, *lines: str, head: str = HEAD) -> Path:
    path = folder / "losses.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def test_required_columns_and_units(tmp_path: Path) -> None:
    (row,) = read_table(table(tmp_path, "pre,110M,29.5M,2.1e16,0,3.25"))
    assert (row.scheme, row.size, row.parameters, row.tokens) == ("pre", "110M", 110_000_000, 29_500_000)
    assert (row.flops, row.seed, row.loss, row.state, row.is_usable) == (2.1e16, 0, 3.25, "done", True)


def test_optional_columns(tmp_path: Path) -> None:
    head = f"{HEAD},size,steps,trunk,lr,note"
    (row,) = read_table(table(tmp_path, "pre,110M,29.5M,2.1e16,0,3.25,12x768,7200,a,1e-3,whatever", head=head))
    assert (row.size, row.steps, row.trunk, row.lr) == ("12x768", 7200, "a", 1e-3)


def test_losses_of_runs_that_did_not_train_are_not_judged(tmp_path: Path) -> None:
    lines = ["pre,110M,29.5M,2.1e16,0,1e300,diverged", "pre,110M,29.5M,2.1e16,1,,done"]
    rows = read_table(table(tmp_path, *lines, head=f"{HEAD},state"))
    assert [(row.state, row.is_usable) for row in rows] == [("diverged", False), ("done", False)]


@pytest.mark.parametrize("loss", ["", "nan", "inf"])
def test_a_run_without_a_loss_did_not_train(tmp_path: Path, loss: str) -> None:
    (row,) = read_table(table(tmp_path, f"pre,110M,29.5M,2.1e16,0,{loss}"))
    assert (row.loss, row.state, row.is_usable) == (None, "failed", False)


@pytest.mark.parametrize("flops", ["", "0", "2e4", "1e30", "inf", "-1"])
def test_only_runs_that_trained_need_plausible_flops(tmp_path: Path, flops: str) -> None:
    """A tracker has those up to where a run ended, or none; the place of a cell is that of the runs that trained."""
    alone, lost, done = read_table(
        table(
            tmp_path, f"pre,110M,59M,{flops},0,,failed", f"pre,110M,29.5M,{flops},0,,failed",
            "pre,110M,29.5M,2.1e16,1,3.25,done", head=f"{HEAD},state",
        )
    )  # fmt: skip
    assert (lost.flops, done.flops, lost.is_usable) == (2.1e16, 2.1e16, False)
    assert alone.flops == pytest.approx(6 * 110e6 * 59e6)
    with pytest.raises(NormLabError, match=r"flops|FLOPs"):
        read_table(table(tmp_path, f"pre,110M,29.5M,{flops},0,3.2"))


@pytest.mark.parametrize(
    ("lines", "head", "message"),
    [
        (["pre,110M,29.5M,0,3.2"], "scheme,parameters,tokens,seed,loss", "has no column flops"),
        (["pre,many,29.5M,1e16,0,3.2"], HEAD, "line 2: parameters: 'many' is not a count"),
        (["pre,110M,29.5M,1e16,0,low"], HEAD, "line 2: loss: 'low' is not a number; write it as 3.25"),
        (["pre,110M,29.5M,-1,0,3.2"], HEAD, "line 2: flops must be positive, got -1; give those"),
        (["pre,110M,29.5M,1e16,0,-3.2"], HEAD, "line 2: loss must be positive, got -3.2; leave it empty"),
        (["pre,110M,29.5M,1e16,0,1e300"], HEAD, r"line 2: a loss of 1e\+300 nats a token is that of no model"),
        (["pre,110M,29.5M,1e16,0.5,3.2"], HEAD, "line 2: seed: '0.5' is not a whole number; count seeds"),
        (["", "pre,110M,29.5M,1e16,,3.2"], HEAD, "line 3: seed is empty"),
        (
            ["pre,110M,29.5M,1e16,0,3.2,ended"],
            f"{HEAD},state",
            "unknown state 'ended'; expected done, stuck, .* leave out",
        ),
        ([], HEAD.replace(",", "|"), "no column scheme; expected .* a CSV table, got scheme|parameters"),
        ([], HEAD.replace(",seed", ""), r"no column seed \(number the runs .*\); expected scheme, .*, got scheme"),
        (["pre;110M;29.5M;2e16;0;3,25"], HEAD.replace(",", ";"), "line 2: loss: '3,25' is not a number; write it as"),
        # In TFLOPs; FLOPs of one token, in a table of one budget a size; parameters in millions.
        (["pre,110M,29.5M,2e4,0,3.2"], HEAD, "has 6.2e-12 FLOPs a token and parameter, where about 6 are usual"),
        (["pre,11M,29.5M,7e7,0,3.2", "pre,110M,59M,7e8,0,3.1"], HEAD, "has 2.2e-07 FLOPs a token and parameter"),
        (["pre,110,29.5M,2e16,0,3.2"], HEAD, r"has 6.2e\+06 FLOPs a token and parameter"),
        (["pre,110M,29.5M,2e16,0,557"], HEAD, "leave it empty, or give the logarithm of a perplexity"),
        ([], "", "has no column scheme; .* got an empty line"),
        (["pre,110M,29.5M,1e16,0,3.2", "pre,110M,29.5M,1e16,0,3.3"], HEAD, "listed twice"),
        (
            ["pre,110M,29.5M,1e16,0,3.2,deep", "pre,110M,29.5M,1e16,0,3.3,wide"],
            f"{HEAD},size",
            "pre has 110,000,000 parameters with both deep and wide, .*; give exact counts",
        ),
        # Whatever their seeds.
        (
            ["pre,110M,29.5M,2e16,0,3.2,deep", "pre,110M,29.5M,2e16,1,3.3,wide"],
            f"{HEAD},size",
            "pre has 110,000,000 parameters with both deep and wide, .*; give exact counts",
        ),
        # And whatever their budgets.
        (
            ["pre,110M,29.5M,2e16,0,3.2,deep", "pre,110M,59M,4e16,0,3.1,wide"],
            f"{HEAD},size",
            "pre has 110,000,000 parameters with both deep and wide, .*; give exact counts",
        ),
        (["pre,110M,29.5M,1e16,0,3,25"], HEAD, "line 2 has 7 cells for 6 columns; write decimals with a point"),
        (["pre,110M,29.5M,1e16,0,3.2,3.3"], f"{HEAD},loss", "two columns loss; keep one"),
        (["pre,110M,29.5M,1e16,0,3.2,-5"], f"{HEAD},tokens_per_s", "tokens_per_s must be positive, got -5; leave it"),
        (["pre,110M,29.5M,1e16,0,3.2,inf"], f"{HEAD},tokens_per_s", "tokens_per_s must be positive, got inf"),
        (
            ["pre,110M,59M,7e8,0,3.2", "pre,110M,29.5M,7e8,0,3.3"],
            HEAD,
            "pre with 110M has 7e[+]08 FLOPs at 29,500,000 tokens and 7e[+]08 at 59,000,000; give those of the whole",
        ),
        (
            ["pre,11M,29.5M,2e15,0,3.4,small", "pre,23M,59M,8e15,0,3.2,small"],
            f"{HEAD},size",
            "pre with small has 11,000,000 parameters and 23,000,000; name each size apart in a column size",
        ),
        # One name, 110M, for two numbers that round to it.
        (["pre,110.1M,29.5M,2e16,0,3.4", "pre,110.4M,59M,4e16,0,3.2"], HEAD, "110,100,000 parameters and 110,400,000"),
    ],
)
def test_bad_tables_are_refused_in_one_line(tmp_path: Path, lines: list[str], head: str, message: str) -> None:
    with pytest.raises(NormLabError, match=message) as error:
        read_table(table(tmp_path, *lines, head=head))
    assert "\n" not in str(error.value)


def test_empty_cells_at_the_end_of_a_line_are_no_cells(tmp_path: Path) -> None:
    (row,) = read_table(table(tmp_path, "pre,110M,29.5M,2.1e16,0,3.25,,"))
    assert row.loss == 3.25


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_tables_that_other_programs_export_are_read(tmp_path: Path, separator: str) -> None:
    """With an index, names that begin with a capital, and whole numbers that pandas wrote as decimals."""
    path = tmp_path / "losses.csv"
    lines = [",Scheme,Parameters,Tokens,FLOPs,Seed,Loss,State", "0,pre,110e6,29500000.0,2.1e16,1.0,3.25,finished",
             "1,pre,110e6,29500000.0,2.1e16,2.0,,failed", "2,pre,110e6,29500000.0,2.1e16,3.0,nan,finished"]  # fmt: skip
    path.write_text("\n".join(lines).replace(",", separator), newline="\r\n")
    first, second, third = read_table(path)
    assert (first.scheme, first.parameters, first.tokens, first.flops) == ("pre", 110_000_000, 29_500_000, 2.1e16)
    assert (first.seed, first.loss, first.state, second.seed, second.state) == (1, 3.25, "done", 2, "failed")
    assert (third.seed, third.loss, third.state) == (3, None, "failed")


def test_other_encodings_are_named(tmp_path: Path) -> None:
    (tmp_path / "losses.csv").write_text(HEAD, encoding="utf-16")
    with pytest.raises(NormLabError, match="it is not UTF-8 text; expected a CSV table in UTF-8 with scheme"):
        read_table(tmp_path / "losses.csv")


def test_seeds_that_no_scheme_shares_with_the_baseline_are_refused(tmp_path: Path) -> None:
    lines = ["pre,110M,29.5M,2e16,0,3.2", "peri,110M,29.5M,2e16,1,3.1"]
    with pytest.raises(NormLabError, match=r"no scheme has a seed in common with pre \(pre: seed 0; peri: seed 1\)"):
        read_losses(table(tmp_path, *lines))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NormLabError, match="cannot read"):
        read_table(tmp_path / "nowhere.csv")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "losses.csv").touch()
    with pytest.raises(NormLabError, match="has no column scheme"):
        read_table(tmp_path / "losses.csv")


def test_tables_of_spreadsheets_and_with_spaces_are_read(tmp_path: Path) -> None:
    path = table(tmp_path, "pre , 110M, 29.5M, 2.1e16, 0, 3.25", "", ",,,,,", head=HEAD.replace(",", ", "))
    path.write_text(path.read_text(), encoding="utf-8-sig")
    (row,) = read_table(path)
    assert (row.scheme, row.parameters, row.loss) == ("pre", 110_000_000, 3.25)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no rows; a gap needs"),
        (["pre,110M,29.5M,1e16,0,3.2"], r"has one scheme \(pre\); a gap needs"),
        (["pre,110M,29.5M,1e16,0,", "peri,110M,29.5M,1e16,0,nan"], "has no run with a loss; a gap needs"),
    ],
)
def test_a_table_without_a_gap_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(NormLabError, match=message):
        read_losses(table(tmp_path, *lines))


@pytest.mark.parametrize("target", ["0:26B", "1.3B:0"])
def test_a_target_of_nothing_is_refused(tmp_path: Path, target: str) -> None:
    lines = [f"{scheme},110M,29.5M,1e16,0,3.2" for scheme in ("pre", "peri")]
    with pytest.raises(NormLabError, match="parameters and tokens must be positive"):
        read_losses(table(tmp_path, *lines), targets=[target])


@pytest.mark.parametrize("target", ["1.3B", "12x768:400M", "1.3B:much"])
def test_a_target_of_another_kind_is_refused_with_what_is_expected(tmp_path: Path, target: str) -> None:
    lines = [f"{scheme},110M,29.5M,1e16,0,3.2" for scheme in ("pre", "peri")]
    with pytest.raises(NormLabError, match=f"'{target}' is not a target of a table; expected parameters:tokens"):
        read_losses(table(tmp_path, *lines), targets=[target])


def test_a_target_has_the_flops_of_the_baseline(tmp_path: Path) -> None:
    """Gaps are over the baseline's compute, whatever a scheme with parameters and FLOPs of its own needs."""
    lines = ["post,120M,29.5M,4e16,0,3.2,base", "pre,100M,29.5M,2e16,0,3.25,base"]
    (place,) = read_losses(table(tmp_path, *lines, head=f"{HEAD},size"), targets=["200M:59M"]).targets
    assert place.flops == pytest.approx(4 * 2e16, rel=1e-12)


def test_sizes_that_only_parameters_name_apart_are_to_be_named(tmp_path: Path) -> None:
    """A scheme with parameters of its own has no size in common with the baseline, unless sizes have names."""
    path = table(tmp_path, "pre,110M,29.5M,1e16,0,3.2", "ngpt,135M,29.5M,1e16,0,3.1")
    with pytest.raises(NormLabError, match=r"in common with pre .*; name sizes alike in a column size"):
        read_losses(path)
    lines = "pre,110M,29.5M,1e16,0,3.2,12x768", "ngpt,135M,29.5M,1e16,0,3.1,12x768"
    (own,) = read_losses(table(tmp_path, *lines, head=f"{HEAD},size")).report().answer.schemes
    assert own.cells[0].differences == {"0": pytest.approx(-0.1)}


def test_the_page_of_a_table_is_built_again_without_the_table(tmp_path: Path) -> None:
    lines = [f"{scheme},110M,29.5M,1e16,{seed},3.{seed}" for seed in (1, 2) for scheme in ("pre", "peri")]
    losses = read_losses(table(tmp_path, *lines, "pre,110M,59M,2e16,0,"), targets=["1.3B:26B"], level=0.9)
    losses.store(tmp_path)
    (tmp_path / "losses.csv").unlink()
    assert is_ladder(tmp_path)
    assert read_report(tmp_path).answer == losses.report().answer
    assert list(read_report(tmp_path).rows) == losses.rows
    assert build(tmp_path) == tmp_path / "report.html"
    assert "peri" in markdown(tmp_path)


def test_a_table_does_not_take_the_place_of_a_trained_ladder(tmp_path: Path) -> None:
    (tmp_path / "ladder.json").write_text("{}")
    lines = [f"{scheme},110M,29.5M,1e16,0,3.2" for scheme in ("pre", "peri")]
    with pytest.raises(NormLabError, match=r"holds a ladder \(ladder\.json\); choose another folder"):
        read_losses(table(tmp_path, *lines)).store(tmp_path)
