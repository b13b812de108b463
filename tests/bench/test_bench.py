"""The benchmarks' own rules: parity before speed, figures that can be repeated, one line where there is no GPU."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from normlab import NormLabError
from normlab.bench import kernels, plot, run
from normlab.bench.timing import Timing

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these are the rules for machines without a GPU")


def test_quantiles():
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (timing.low, timing.median, timing.high) == (2.0, 3.0, 4.0)


def test_no_figure_without_parity():
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(NormLabError, match=r"differ by .*; no speed is reported"):
        kernels._check_parity("broken", lambda: (x * 1.1, x), lambda: (x * 1.0, x), [x])
    kernels._check_parity("right", lambda: (x * 1.0, x), lambda: (x * 1.0, x), [x])


def test_a_peer_that_differs_is_named_and_not_timed(capsys):
    x = torch.randn(4, 8, requires_grad=True)
    assert kernels._is_peer("same", lambda: (x * 1.0, x), lambda: (x * 1.0, x), [x])
    assert not kernels._is_peer("other", lambda: (x * 1.1, x), lambda: (x * 1.0, x), [x])
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


def test_cases_of_several_streams_run_and_count_in_updates(monkeypatch):
    monkeypatch.setattr(kernels, "CPU_SHAPES", ((8, 64),))
    monkeypatch.setattr(torch, "compile", lambda call: call)
    moved = [row["bytes_moved"] // (8 * 64 * 4) for row in run.kernels(only="streams", cpu=True)]
    assert moved == [5, 8, 10, 15, 9, 14, 5, 13]


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
    assert run._kept(out) == []


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
