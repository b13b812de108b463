"""The benchmarks' own rules: parity before speed, figures that can be repeated, one line where there is no GPU."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from normlab import NormLabError
from normlab.bench import kernels, plot, results_file, run
from normlab.bench.timing import Timing
from normlab.cli.main import main

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these are the rules for machines without a GPU")


def test_quantiles():
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (timing.low, timing.median, timing.high) == (2.0, 3.0, 4.0)


def test_no_figure_without_parity():
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(NormLabError, match=r"differ by .*; no speed is reported"):
        kernels._check_parity("broken", lambda: (x * 1.1, x), [x], expected(x))
    kernels._check_parity("right", lambda: (x * 1.0, x), [x], expected(x))


def expected(x: torch.Tensor) -> list[torch.Tensor]:
    return kernels._results(lambda: (x * 1.0, x), [x])


def test_a_peer_that_differs_is_named_and_not_timed(capsys):
    x = torch.randn(4, 8, requires_grad=True)
    assert kernels._is_peer("same", lambda: (x * 1.0, x), [x], expected(x))
    assert not kernels._is_peer("other", lambda: (x * 1.1, x), [x], expected(x))
    assert "other is left out: other and the reference differ by" in capsys.readouterr().err


def test_cases_move_what_the_cards_say():
    from normlab.schemes import scheme
    from normlab.schemes.catalog.card import Card

    cases = {case.name: (case.forward, case.backward) for case in kernels.CASES}
    named = {
        "geonorm": "geodesic step",
        "pre": "add + norm (pre)",
        "peri": "norm-add-norm (peri)",
        "dual": "two streams (dual)",
        "hc(dynamic=False)": "4 streams, write + norm (hc static)",
    }
    for name, case in named.items():
        forward, backward = Card.of(scheme(name)).traffic
        assert cases[case] == (forward // 2, backward // 2)
    # Where coefficients depend on the streams, two kernels more read them once more, backward.
    forward, backward = cases["4 streams, write + norm (hc static)"]
    parts = [cases[f"4 streams, {part} (mhc)"] for part in ("write", "logits", "sum + norm")]
    for name in ("mhc", "hc"):
        whole = cases[f"4 streams, write + coefficients + norm ({name})"]
        assert Card.of(scheme(name)).traffic == (2 * whole[0], 2 * whole[1])
        assert whole == (forward, backward + 9)
        # A kernel for each of the three moves more.
        assert sum(whole) < 0.6 * sum(sum(part) for part in parts)


def test_cases_of_several_streams_run_and_count_in_updates(monkeypatch):
    monkeypatch.setattr(kernels, "CPU_SHAPES", ((8, 64),))
    monkeypatch.setattr(torch, "compile", lambda call: call)
    moved = [row["bytes_moved"] // (8 * 64 * 4) for row in run.kernels(only="streams", cpu=True)]
    # In whole updates of 64 numbers a token: a matrix of 16 logits is less than one.
    assert moved == [5, 8, 10, 15, 10, 25, 10, 25, 9, 14, 5, 13, 4, 12, 4, 12, 0, 0, 4, 13]


def test_numbers_beside_the_tensors_are_counted_in_fp32():
    case = next(case for case in kernels.CASES if case.name == "4 streams, logits (mhc)")
    # A token has four streams in bf16, 24 results and an inverse RMS; backward the gradient of the results as well.
    assert case.bytes_moved((8, 64), torch.bfloat16) == {
        "forward": 8 * (4 * 64 * 2 + 25 * 4),
        "backward": 8 * (12 * 64 * 2 + 49 * 4),
    }


def test_figures_are_kept_with_what_it_takes_to_repeat_them(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "CPU_SHAPES", ((8, 64),))
    monkeypatch.setattr(torch, "compile", lambda call: call)  # the compiler has its own tests
    monkeypatch.setattr(sys, "argv", ["normlab", "bench", "kernels", "--out", "/some/where", "--cpu", "--plot=x.svg"])
    out = tmp_path / "figures" / "kernels.json"
    found = run.kernels(only="geodesic", cpu=True, out=out)
    kept = json.loads(out.read_text())
    assert kept["command"] == "normlab bench kernels --cpu"
    assert kept["torch"] == torch.__version__
    assert [row["direction"] for row in kept["rows"]] == ["forward", "backward"]
    assert len(kept["rows"]) == len(found)
    assert kept["rows"][0]["bytes_moved"] == 3 * 8 * 64 * 4
    assert list(out.parent.iterdir()) == [out]


def test_what_was_cut_short_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "CPU_SHAPES", ((8, 64), (8, 96)))
    monkeypatch.setattr(torch, "compile", lambda call: call)
    measured, out = [], tmp_path / "kernels.json"
    whole = kernels._rows

    def cut(place, *rest):
        if len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(place)
        yield from whole(place, *rest)

    monkeypatch.setattr(kernels, "_rows", cut)
    with pytest.raises(KeyboardInterrupt):
        run.kernels(only="geodesic", cpu=True, out=out)
    assert json.loads(out.read_text())["complete"] is False
    monkeypatch.setattr(kernels, "_rows", whole)
    found = run.kernels(only="geodesic", cpu=True, out=out)
    assert measured == [("geodesic step", (8, 64))]
    assert [(tuple(row["shape"]), row["direction"]) for row in found] == [
        (shape, direction) for shape in kernels.CPU_SHAPES for direction in ("forward", "backward")
    ]
    kept = json.loads(out.read_text())
    assert kept["complete"] is True
    assert len(kept["rows"]) == 4
    # A finished file is measured anew.
    assert results_file.kept(out) == []


def test_plots_are_drawn_or_refused_before_anything_is_measured(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="an extra of its own")
    monkeypatch.setattr(kernels, "CPU_SHAPES", ((8, 64), (8, 96)))
    monkeypatch.setattr(torch, "compile", lambda call: call)
    run.kernels(only="geodesic", cpu=True, plot=tmp_path / "kernels.svg")
    text = (tmp_path / "kernels.svg").read_text()
    assert "geodesic step, backward" in text
    assert "8×96" in text
    rows = [{"scheme": s, "kernels": "triton", "over_pre": r, "paired": [r, r]} for s, r in (("pre", 1.0), ("x", 0.9))]
    plot.draw_steps(rows, tmp_path / "steps.png")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kernels.svg", "steps.png"]
    monkeypatch.setattr(kernels, "rows", lambda *_: pytest.fail("measured"))
    with pytest.raises(NormLabError, match=r"cannot draw 'kernels.gif'; expected"):
        run.kernels(cpu=True, plot=tmp_path / "kernels.gif")


def test_bad_input_gets_one_clear_line():
    with pytest.raises(NormLabError, match="no GPU here: Triton kernels cannot be timed; --cpu compares"):
        run.kernels()
    with pytest.raises(NormLabError, match="no step's name contains 'geodesy'"):
        run.kernels(only="geodesy", cpu=True)
    with pytest.raises(NormLabError, match="did you mean 'peri'"):
        run.step(["peery"], preset="tiny", batch=1, length=8, stream="bf16")
    with pytest.raises(NormLabError, match="unknown preset"):
        run.step(["peri"], preset="huge", batch=1, length=8, stream="bf16")
    with pytest.raises(NormLabError, match="repeats must be at least 1, got 0"):
        run.step(["pre"], preset="tiny", batch=1, length=8, stream="bf16", repeats=0)
    with pytest.raises(NormLabError, match="no GPU here: bench step needs one"):
        run.step(["pre"], preset="tiny", batch=1, length=8, stream="bf16")


def test_figures_that_cannot_be_kept_are_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "rows", lambda *_: pytest.fail("measured"))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(NormLabError, match="cannot write to"):
        run.kernels(cpu=True, out=blocked / "figures.json")
    with pytest.raises(NormLabError, match="is a folder; expected a file"):
        run.kernels(cpu=True, out=tmp_path)


_PLACES = [(kernels.CASES[0].name, (8, 64)), (kernels.CASES[1].name, (8, 64)), (kernels.CASES[1].name, (8, 96))]


@pytest.fixture
def threads(monkeypatch):
    """Threads in place of processes, on a machine whose GPU has memory for four places of one stream."""
    monkeypatch.setattr(kernels, "ProcessPoolExecutor", lambda workers, _: ThreadPoolExecutor(workers))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 * kernels._BYTES * 8 * 96, 0))
    monkeypatch.setattr(kernels.os, "cpu_count", lambda: 16)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")


def _compile_but(monkeypatch, broken, error):
    def compile_place(place, _):
        if place == broken:
            raise error

    monkeypatch.setattr(kernels, "_compile", compile_place)


def test_every_compiled_place_has_a_line(threads, monkeypatch):
    _compile_but(monkeypatch, None, None)
    said = []
    assert kernels.compile_ahead(torch.bfloat16, _PLACES, said.append) == {}
    assert said[0] == "compiling 3 places in 3 processes"
    assert [line.split()[1] for line in said[1:]] == ["1/3", "2/3", "3/3"]
    for place in _PLACES:
        assert sum(kernels.name_of(place) in line for line in said) == 1
    assert kernels.compile_ahead(torch.bfloat16, [], said.append) == {}


def test_a_slow_compilation_is_named_while_it_lasts(threads, monkeypatch):
    monkeypatch.setattr(kernels, "_PATIENCE", 0.05)
    monkeypatch.setattr(kernels, "_compile", lambda *_: time.sleep(0.5))
    said = []
    kernels.compile_ahead(torch.bfloat16, _PLACES[:1], said.append)
    assert said[1].startswith("still compiling after 0 s: geodesic step 8×64")


@pytest.mark.parametrize(
    ("error", "line"),
    [(NormLabError("they differ by 2"), "they differ by 2"), (MemoryError("full\nmore"), "MemoryError: full")],
)
def test_a_place_that_fails_is_named_at_once_and_costs_no_other(threads, monkeypatch, error, line):
    _compile_but(monkeypatch, _PLACES[1], error)
    said = []
    assert kernels.compile_ahead(torch.bfloat16, _PLACES, said.append) == {_PLACES[1]: line}
    assert [text for text in said if text.endswith(f"{kernels.name_of(_PLACES[1])}, failed: {line}")]
    assert len(said) == 4


def test_processes_share_cores_and_memory(threads, monkeypatch):
    four = next(case.name for case in kernels.CASES if case.streams == 4)
    assert kernels._workers([(kernels.CASES[0].name, (8, 96))] * 9) == 4
    assert kernels._workers([(four, (8, 96))] * 9) == 1
    assert kernels._workers([(four, (8, 960))] * 9) == 1
    monkeypatch.setattr(kernels.os, "cpu_count", lambda: 4)
    assert kernels._workers([(kernels.CASES[0].name, (8, 96))] * 9) == 2


def test_what_failed_is_refused_after_the_rest_was_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda call: call)
    broken, out = ("geodesic step", (8, 96)), tmp_path / "kernels.json"
    measure = kernels.rows
    monkeypatch.setattr(run, "_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(kernels, "compile_ahead", lambda *_: {broken: "they differ"})
    monkeypatch.setattr(kernels, "rows", lambda _, dtype, places: measure(torch.device("cpu"), dtype, places))
    with pytest.raises(NormLabError, match=r"^1 of 2 places are not measured: geodesic step 8×96 \(they differ\)$"):
        run.kernels(only="geodesic", shapes=["8x64", "8x96"], out=out)
    kept = json.loads(out.read_text())
    assert kept["complete"] is False
    assert {tuple(row["shape"]) for row in kept["rows"]} == {(8, 64)}
    assert "8×64" in capsys.readouterr().out


def test_shapes_choose_a_part(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call: call)
    found = run.kernels(only="geodesic", shapes=["8x64", "4×96", "8x64"], cpu=True)
    assert [row["shape"] for row in found] == [(8, 64)] * 2 + [(4, 96)] * 2
    assert kernels.plan(torch.device("cuda"), "geodesic") == [("geodesic step", shape) for shape in kernels.SHAPES]


@pytest.mark.parametrize("bad", ["768", "0x768", "65536x", "65536x768x4"])
def test_a_bad_shape_is_one_line_and_exit_code_2(bad, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["normlab", "bench", "kernels", "--cpu", "--shapes", "8x64", bad])
    monkeypatch.setattr(kernels, "rows", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said == f"normlab: {bad!r} is not a shape; expected tokens x width, e.g. 65536x768\n"
