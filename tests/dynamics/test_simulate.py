"""Simulations from the outside: what they hold, that they repeat, and that options mean what they say."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import normlab
from normlab.dynamics.config import OBSERVABLES, SimulateConfig
from normlab.dynamics.measure import fits
from normlab.dynamics.recording import record_law
from normlab.dynamics.result import Simulation
from normlab.dynamics.simulate import simulate
from normlab.dynamics.system import laws
from normlab.dynamics.system.equiangular import Equiangular
from normlab.dynamics.system.read_weights import read_attention
from normlab.dynamics.system.systems import initial_state, sample_times, system_chunks
from normlab.dynamics.system.weights import fixed_weights
from normlab.errors import NormLabError
from normlab.models import Decoder, DecoderConfig
from normlab.schemes.contract.law import Law, on_sphere
from normlab.utils.comma_lists import split_commas
from tests.matrix import parametrize, quick_if

SMALL = {"tokens": 12, "dim": 4, "time": 2.0, "looks": 10}


def test_a_simulation_holds_every_observable_over_time():
    found = simulate(["peri", "post"], beta=(1, 3), seeds=3, **SMALL)
    assert [(run.scheme, run.beta) for run in found.runs] == [("peri", 1), ("peri", 3), ("post", 1), ("post", 3)]
    for run in found.runs:
        assert run.times == pytest.approx(np.linspace(0, 2, 11))
        assert set(run.bands) == set(OBSERVABLES)
        for band in run.bands.values():
            assert len(band.mean) == len(band.low) == len(band.high) == 11
        assert np.shape(run.histogram) == (11, 40)
        assert np.sum(run.histogram, axis=1) == pytest.approx(np.ones(11), abs=40 * 5e-5)
        assert np.shape(run.paths) == (11, 12, 3)
    assert found.run("post", 3) is found.runs[3]
    assert "post" in found.table()


def test_a_simulation_is_the_same_after_json(tmp_path):
    found = simulate("pre", seeds=2, **SMALL)
    path = found.save(tmp_path / "run.json")
    again = Simulation.from_json(path.read_bytes())
    assert again == found
    assert json.loads(path.read_text())["config"]["tokens"] == 12
    with pytest.raises(NormLabError, match=r"must end in \.json"):
        found.save(tmp_path / "run.txt")
    for text in ("{", "[]", '{"schema": 99}'):
        with pytest.raises(NormLabError, match="not a simulation"):
            Simulation.from_json(text)


def test_systems_do_not_depend_on_their_company(monkeypatch):
    """Chunks, other seeds and other temperatures change nothing: only matrix products of another shape round anew."""
    config = SimulateConfig(scheme=("peri",), beta=(0.5, 4.0), seeds=3, weights="gaussian", dtype="float64", **SMALL)
    whole = record_law(config, "peri")
    monkeypatch.setattr("normlab.dynamics.system.systems._MOST", 2)
    assert len(list(system_chunks(config))) == 3
    parted = record_law(config, "peri")
    alone = record_law(config.replace(beta=4.0, seed=2, seeds=1), "peri")
    for name in OBSERVABLES:
        assert parted.values[name] == pytest.approx(whole.values[name], abs=1e-11), name
        assert alone.values[name][:, 0, 0] == pytest.approx(whole.values[name][:, 1, 2], abs=1e-11), name
    assert whole.histogram is not None
    assert whole.paths is not None
    assert parted.histogram == pytest.approx(whole.histogram, abs=1e-12)
    assert parted.paths == pytest.approx(whole.paths, abs=1e-6)


def test_bands_are_means_and_quantiles_over_seeds():
    config = SimulateConfig(seeds=9, **SMALL)
    values = record_law(config, "post").values["cosine"][:, 0]
    band = simulate("post", config=config).run()["cosine"]
    assert band.mean == pytest.approx(values.mean(1))
    assert band.low == pytest.approx(np.quantile(values, 0.05, axis=1))
    assert band.high == pytest.approx(np.quantile(values, 0.95, axis=1))


@quick_if(lambda clock, method: (clock, method) in (("plain", "rk4"), ("log", "dopri")))
@pytest.mark.parametrize("method", ["rk4", "dopri"])
@pytest.mark.parametrize("clock", ["plain", "log"])
@parametrize("scheme", ["post", "pre", "peri", "keel"], quick=["peri"])
def test_orthonormal_tokens_follow_the_symmetric_equations(scheme, method, clock):
    options = {"method": method, "clock": clock, "dtype": "float64", "start": "orthonormal", "time": 8.0}
    config = SimulateConfig(tokens=8, dim=8, beta=1.5, looks=16, **options)
    found = record_law(config, scheme)
    law = laws.find_law(scheme, config.layers)
    rho, radius = Equiangular(law, 8, 1.5).orbit(torch.tensor(sample_times(config), dtype=torch.float64)).T.numpy()
    # RK4 at 0.05: the error of a step, (speed 0.05)⁵/120, over 160 of them; Peri's speed begins at 3.
    assert found.values["cosine"][:, 0, 0] == pytest.approx(rho, abs=2e-6)
    assert found.values["radius"][:, 0, 0] == pytest.approx(radius, rel=2e-6)


def test_the_network_comes_close_as_it_is_cut():
    options = {"tokens": 8, "dim": 4, "time": 4.0, "looks": 4, "dtype": "float64", "observables": ("cosine",)}
    exact = simulate("peri", **options).run()["cosine"].mean[-1]
    errors = [
        abs(simulate("peri", method="network", cut=cut, **options).run()["cosine"].mean[-1] - exact)
        for cut in (4, 8, 16)
    ]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.25)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.15)


def test_fitted_tails_are_those_predicted():
    options = {"tokens": 16, "dim": 4, "start": "clustered", "dtype": "float64", "seeds": 3}
    post = simulate("post", time=20.0, **options).run()
    assert post.tail is not None
    assert (post.tail.form, post.fits[0].predicted) == ("exponential", pytest.approx(-2.0))
    assert post.fits[0].rate.value == pytest.approx(-2.0, abs=1e-5)
    pre = simulate("pre", time=1e6, clock="log", **options).run()
    fits = {fit.observable: fit for fit in pre.fits}
    # Var = C (t + c)^−2 with c of order one: over the last half of log time, from t = 10³ on.
    assert fits["variance"].rate.value == pytest.approx(-2.0, abs=2e-3)
    assert fits["radius"].rate.value == pytest.approx(1.0, abs=2e-3)
    assert fits["radius"].error == fits["radius"].rate.value - fits["radius"].predicted


def test_no_growth_is_predicted_for_tokens_that_have_not_gathered():
    """r ∝ t is the tail's law: from a uniform start at β = 4 radii grow more slowly for long."""
    run = simulate("peri(step=0.1)", beta=4.0, tokens=64, dim=64, time=50.0, step=0.25).run()
    assert [fit.observable for fit in run.fits] == ["radius"]
    assert run.fits[0].rate.value < 0.8
    assert run.fits[0].predicted is None
    assert run.tail is not None


def test_random_weights_have_no_prediction_and_tokens_that_stay_apart_no_tail():
    run = simulate("post", weights="gaussian", **SMALL).run()
    assert run.tail is None
    assert simulate("post", beta=50.0, **SMALL).run().fits == ()


def test_merges_are_those_of_the_first_seed():
    run = simulate("post", tokens=10, dim=2, beta=1.0, time=12.0, looks=60).run()
    counts = run["clusters"].mean
    assert run.merges[-1].clusters == 1
    for merge in run.merges:
        assert counts[run.times.index(merge.time)] == merge.clusters


def test_paths_keep_lengths_where_three_axes_hold_all_and_say_how_much_they_hold():
    flat = simulate("post", tokens=6, dim=2, time=1.0, looks=3)
    assert flat.explained == 1.0
    lengths = np.linalg.norm(np.array(flat.runs[0].paths), axis=-1)
    # Four decimals are kept.
    assert lengths == pytest.approx(np.ones_like(lengths), abs=2e-4)
    wide = simulate(["post", "pre"], tokens=6, dim=30, time=1.0, looks=3)
    assert wide.explained is not None
    assert 0.3 < wide.explained < 1.0
    # All runs begin at the same tokens and are drawn on the same axes.
    assert wide.runs[0].paths[0] == wide.runs[1].paths[0]
    assert simulate("post", shown=0, bins=0, **SMALL).runs[0].paths == ()


def test_a_law_or_a_scheme_itself_can_be_given():
    law = Law(speed=lambda m: torch.ones_like(m.radius), rms=on_sphere, forward="bounded", backward="")
    mine, post = simulate(law, **SMALL).run(), simulate(normlab.scheme("post"), **SMALL).run()
    assert mine.scheme == "law"
    assert mine["cosine"] == post["cosine"]


def test_a_start_off_the_sphere_is_told_where_the_network_would_not_keep_it():
    """Mix-LN's law after the switch divides by the radius it began with; its network by one."""
    told = simulate(["mix", "pre", "sqrt"], radius=2.0, **SMALL).notes
    assert [note for note in told if "radius 2" in note] == [
        "mix: the law carries the radius 2 on; its network puts tokens on the unit sphere at once"
    ]
    for options in ({"radius": 1.0}, {"radius": 2.0, "method": "network"}):
        assert not any("sphere at once" in note for note in simulate("mix", **options, **SMALL).notes)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokens": 10**8}, "100,000,000 tokens have too many pairs; expected at most 10,000,000"),
        ({"time": 1e12}, "2e[+]13 steps to time 1e[+]12 are more than 1e[+]09; try --clock log"),
        ({"time": 1e10, "method": "network"}, "1e[+]10 steps to time"),
        ({"time": 1e10, "clock": "log", "weights": "gaussian", "redraw": True}, "1e[+]10 steps to time"),
        ({"looks": 10**9}, "recorded numbers are more than 1e[+]09; try fewer --looks"),
        ({"seeds": 10**9}, "recorded numbers are more than"),
        ({"bins": 10**9}, "recorded numbers are more than"),
        ({"dim": 10**6}, "numbers in a matrix are more than 1e[+]09; try a smaller --dim"),
        ({"mlp": 10**9}, "numbers in a matrix are more than"),
    ],
)
def test_a_simulation_that_no_machine_can_hold_or_end_is_refused(options, says):
    with pytest.raises(NormLabError, match=says):
        SimulateConfig(**options)


def test_a_late_end_in_logarithmic_time_is_not_refused():
    assert SimulateConfig(time=1e12, clock="log").steps < 1000
    assert SimulateConfig(time=1e12, method="dopri").steps == 0


def test_matrices_of_ones_own_are_followed():
    """V = 1/2 is the identity at half the pace; the identity given is the identity."""
    options = {**SMALL, "dtype": "float64", "seeds": 2}
    one = torch.eye(4, dtype=torch.float64)
    slow = simulate("post", matrices=fixed_weights(value=one / 2), **options | {"time": 4.0})
    plain = simulate(["post", "peri"], **options)
    assert slow.run()["cosine"].mean == pytest.approx(plain.run("post")["cosine"].mean, abs=1e-8)
    assert (slow.run().tail, slow.config["weights"]) == (None, "given")
    same = simulate(["post", "peri"], matrices=fixed_weights(query=one, key=one, value=one), **options)
    assert same.run("peri")["cosine"].mean == pytest.approx(plain.run("peri")["cosine"].mean, abs=1e-12)


def test_a_networks_attention_moves_tokens_of_a_free_run():
    found = read_attention(Decoder(DecoderConfig(depth=3, dim=16, heads=4, vocab_size=11, scheme="peri")))
    options = {"tokens": 8, "dim": 16, "beta": found.beta, "causal": True, "looks": 3}
    run = simulate("peri", matrices=found.weights, time=3.0, **options).run()
    assert np.isfinite(run["cosine"].mean).all()
    assert run["cosine"].mean[-1] != run["cosine"].mean[0]
    with pytest.raises(NormLabError, match="layer 4 has no weights: 3 layers were given; a shorter horizon"):
        simulate("peri", matrices=found.weights, time=5.0, **options)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((3, 3), "matrices for dimension 3 and tokens of dimension 4; try dim=3"),
        ((2, 1, 4, 4), r"expected matrices \(heads, d, d\) for all systems, got \(2, 1, 4, 4\)"),
    ],
)
def test_matrices_that_do_not_fit_are_one_line(shape, says):
    with pytest.raises(NormLabError, match=says):
        simulate("post", matrices=fixed_weights(value=torch.zeros(shape)), **SMALL)


@pytest.mark.parametrize("start_name", ["uniform", "orthonormal", "clustered"])
def test_starts_are_unit_tokens_that_a_seed_repeats(start_name):
    config = SimulateConfig(tokens=5, dim=6, start=start_name, dtype="float64", radius=2.0)
    first, again = initial_state(config, (3, 4)), initial_state(config, (4,))
    assert torch.linalg.vector_norm(first.theta, dim=-1).numpy() == pytest.approx(np.ones((2, 5)), abs=1e-15)
    assert torch.equal(first.theta[1:], again.theta)
    assert (first.radius == 2.0).all()
    products = first.theta[0] @ first.theta[0].mT
    if start_name == "orthonormal":
        assert products.numpy() == pytest.approx(np.eye(5), abs=1e-14)
    if start_name == "clustered":
        assert products.min() > 0.9


def test_every_switch_of_the_configuration_changes_the_orbit():
    base = simulate("peri", **SMALL).run()["cosine"].mean
    changes = (
        {"causal": True}, {"kind": "unnormalised"}, {"mlp": 16}, {"weights": "symmetric"}, {"radius": 2.0}, {"seed": 1},
        {"weights": "orthogonal", "heads": 2}, {"weights": "kaiming", "redraw": True}, {"method": "network"},
    )  # fmt: skip
    for change in changes:
        assert simulate("peri", **{**SMALL, **change}).run()["cosine"].mean != base, change


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokens": 1}, "tokens must be a whole number from 2 on"),
        ({"dim": 1}, "dim must be a whole number from 2 on"),
        ({"beta": -1}, "β must be finite and not negative"),
        ({"beta": float("nan")}, "β must be finite and not negative"),
        ({"time": 0}, "time must be positive"),
        ({"time": float("inf")}, "time must be positive and finite"),
        ({"start": "orthonormal", "tokens": 9, "dim": 4}, "cannot be orthogonal"),
        ({"method": "euler"}, "unknown method 'euler'"),
        ({"observables": ("cosin",)}, "unknown observable 'cosin'"),
        ({"token": 3}, "unknown option of a simulation 'token'; did you mean 'tokens'"),
        ({"scheme": ()}, "at least one scheme"),
        ({"angle": 4.0}, r"angle must lie in \(0, π\)"),
        ({"angle": 1e-4}, "float32 cannot tell clusters at an angle of 0.0001; try --angle 0.01 or --dtype float64"),
        ({"angle": 1e-7, "dtype": "float64"}, "float64 cannot tell clusters at an angle of 1e-07; try --angle 1e-06"),
        ({"seed": 10**20}, "seeds must stay below 9.2e[+]18, got 100000000000000000000"),
        ({"radius": 1e300}, r"radius must lie in \[1e-06, 1e[+]06\], got 1e[+]300"),
        ({"radius": 1e-30}, "radius must lie in"),
        ({"time": 1e39, "clock": "log"}, "time 1e[+]39 does not fit into float32; try --dtype float64"),
        ({"time": "10"}, "time must be positive and finite, got 10"),
        ({"tolerance": 5.0, "method": "dopri"}, "tolerance must be below 1"),
        ({"beta": "15"}, "β must be a number, or several, got '15'"),
        ({"redraw": "no"}, "redraw must be true or false, got 'no'"),
        ({"method": "network", "time": 0.3}, "no block of the network ends at time 0.3; try --time 1"),
        ({"method": "network", "time": 2.6}, "no block of the network ends at time 2.6; try --time 3"),
        ({"method": "network", "depth": 1}, "a network of depth 1 ends before time 10; try --time 1"),
        ({"heads": 2, "weights": "gaussian"}, "heads do not divide"),
        ({"device": "nowhere"}, "cannot compute on 'nowhere'"),
        ({"model": "runs/a"}, "model is an option of real-model; try normlab simulate real-model --model runs/a"),
        ({"data": "book.txt"}, "data is an option of real-model"),
    ],
)
def test_bad_input_is_one_line(options, says):
    with pytest.raises(NormLabError, match=says) as error:
        simulate(**options)
    assert "\n" not in str(error.value)


def test_numbers_of_numpy_are_numbers():
    config = SimulateConfig(tokens=np.int64(8), beta=np.float32(2.0), time=np.float64(3.0))
    assert config == SimulateConfig(tokens=8, beta=2.0, time=3.0)
    assert SimulateConfig(beta=np.array([1, 4])).beta == (1.0, 4.0)


def test_a_divided_network_may_end_within_a_layer():
    assert simulate("post", method="network", cut=4, **SMALL | {"time": 2.25}).runs[0].times[-1] == 2.25


def test_bad_laws_are_one_line():
    def law(value: float) -> Law:
        return Law(speed=lambda m: m.radius * value, rms=on_sphere, forward="bounded", backward="")

    with pytest.raises(NormLabError, match="unknown scheme or law 'perri'"):
        simulate("perri")
    with pytest.raises(NormLabError, match="NaN"):
        simulate(law(float("nan")), **SMALL)
    with pytest.raises(NormLabError, match="law without a block"):
        simulate("sqrt", method="network", **SMALL)
    late = dataclasses.replace(law(1.0), speed=lambda m: torch.where(m.time > 1.0, torch.nan, m.radius))
    with pytest.raises(NormLabError, match="not finite at time"):
        simulate(late, **SMALL)


def test_lists_on_the_command_line_keep_options_together():
    assert split_commas("pre, peri(step=0.1,norm=layer),,post") == ["pre", "peri(step=0.1,norm=layer)", "post"]


def test_the_configuration_needs_no_torch():
    code = "import sys, normlab.dynamics.config, normlab.dynamics.experiments; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_laws_without_names_are_told_apart():
    one, another = (
        Law(speed=lambda m, s=s: s * torch.ones_like(m.radius), rms=on_sphere, forward="bounded", backward="")
        for s in (1, 2)
    )
    found = simulate([one, "post", another], **SMALL)
    assert [run.scheme for run in found.runs] == ["law 1", "post", "law 2"]
    assert found.run("law 2") is found.runs[2]
    assert simulate(one, **SMALL).runs[0].scheme == "law"


def test_all_is_every_law():
    found = simulate("all", **SMALL)
    assert [run.scheme.partition("(")[0] for run in found.runs] == laws.law_names()
    assert simulate(["all"], **SMALL).config["scheme"] == found.config["scheme"]


def test_every_seed_counts_in_a_rate_without_a_prediction(monkeypatch):
    """With random matrices the tail of one seed of these three looks exponential, those of the others like powers."""
    pooled, pool = [], fits.pool_rates
    monkeypatch.setattr(fits, "pool_rates", lambda rates: pooled.append(rates) or pool(rates))
    options = {"tokens": 8, "dim": 3, "time": 60.0, "step": 0.1, "looks": 60, "dtype": "float64", "start": "clustered"}
    simulate("lns", seeds=3, weights="gaussian", observables=("variance",), **options)
    assert [rate.form for rate in pooled[0]] == ["power"] * 3
