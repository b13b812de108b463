"""Experiments: their defaults exist, their verdicts hold at small sizes, and they can tell when theory is wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import numpy as np
import pytest
import safetensors.torch
import torch

import normlab
from normlab.dynamics import experiments
from normlab.dynamics.config import OBSERVABLE_LABELS, SimulateConfig
from normlab.dynamics.experiments import causal, metastability, phases, random_weights, real_model
from normlab.dynamics.experiments.result import ExperimentResult, judge_prediction
from normlab.dynamics.system import laws
from normlab.dynamics.system.attention import ParticleAttention
from normlab.dynamics.system.flow import Flow, ParticleState
from normlab.dynamics.system.read_weights import read_attention
from normlab.errors import NormLabError
from normlab.models import tokens
from normlab.models.rotary import rotary_table
from normlab.targets import resolve
from normlab.train.trainer import train
from tests.matrix import parametrize

TINY: dict[str, dict] = {
    "speed-laws": {"scheme": ("post", "pre", "sqrt"), "tokens": 8, "dim": 8},
    "random-weights": {"scheme": ("post", "peri"), "tokens": 128, "dim": 128, "beta": 4.0, "seeds": 4, "looks": 4},
    "phase-diagram": {"beta": (0.5, 2.0, 4.0), "seeds": 4},
    "phase-by-scheme": {"scheme": ("post", "pre", "sqrt"), "beta": (0.5, 2.0), "seeds": 8, "time": 20.0, "looks": 40},
    "metastability": {"tokens": 16, "beta": 400.0, "time": 1e20},
    "causal": {"tokens": 400, "beta": (20.0, 80.0, 320.0), "seeds": 2},
    "value-spectrum": {"tokens": 24, "dim": 6},
    "real-model": {"scheme": ("peri",), "tokens": 16, "seeds": 2},
}


@parametrize("name", experiments.EXPERIMENTS, quick=["value-spectrum", "real-model"])
def test_an_experiment_ends_in_figures_a_table_and_verdicts(name, tmp_path):
    found = experiments.run(name, **TINY[name])
    assert found.agrees, [verdict.sentence for verdict in found.verdicts if verdict.agrees is False]
    assert found.experiment == name
    assert found.figures
    assert found.verdicts
    assert all(len(row) == len(found.columns) for row in found.rows)
    assert name in found.table()
    path = found.save(tmp_path / "result.json")
    assert ExperimentResult.from_json(path.read_text()).to_json() == found.to_json()
    for figure in found.figures:
        for curve in figure.curves:
            assert len(curve.x) == len(curve.y)
        if figure.image is not None:
            assert np.shape(figure.image.values) == (len(figure.image.y), len(figure.image.x))


def test_an_unknown_experiment_or_option_is_one_line():
    with pytest.raises(NormLabError, match="unknown experiment 'speed'; did you mean 'speed-laws'"):
        experiments.run("speed")
    with pytest.raises(NormLabError, match="unknown option of a simulation 'tokenz'"):
        experiments.run("causal", tokenz=3)
    with pytest.raises(NormLabError, match="nothing normalises; post does"):
        experiments.run("value-spectrum", scheme="post")
    with pytest.raises(NormLabError, match="metastability is for the circle"):
        experiments.run("metastability", dim=3)
    with pytest.raises(NormLabError, match="causal needs the mask"):
        experiments.run("causal", beta=(1.0, 2.0))
    with pytest.raises(NormLabError, match="causal needs the mask and three different β above zero"):
        experiments.run("causal", beta=(0.0, 1.0, 2.0))
    with pytest.raises(NormLabError, match="no token has joined a leader at β = 30000; try more --tokens"):
        experiments.run("causal", beta=(300.0, 3000.0, 30000.0), tokens=10, time=1.0)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("speed-laws", {"mlp": 8}, "speed-laws: mlp must stay 0, got 8; leave it out"),
        ("speed-laws", {"weights": "kaiming"}, "speed-laws: weights must stay identity, got kaiming"),
        ("speed-laws", {"beta": (1.0, 5.0)}, "speed-laws takes one value of beta, got 1.0, 5.0; try 1.0"),
        ("speed-laws", {"method": "network"}, "speed-laws has no method network; try rk4 or dopri"),
        ("phase-diagram", {"kind": "unnormalised"}, "kind must stay softmax"),
        ("phase-diagram", {"scheme": ("post", "pre")}, "takes one value of scheme, got post, pre; try post"),
        ("phase-by-scheme", {"redraw": True}, "redraw must stay False"),
        ("metastability", {"seeds": 3}, "seeds must stay 1, got 3"),
        ("metastability", {"method": "rk4"}, "has no method rk4; try dopri"),
        ("causal", {"heads": 2}, "heads must stay 1"),
        ("value-spectrum", {"causal": True}, "causal must stay False"),
        ("random-weights", {"observables": ("radius",)}, "observables must stay cosine, speed, got radius"),
        ("real-model", {"dim": 64}, "dim must stay 3, got 64"),
    ],
)
def test_options_that_an_experiment_would_not_heed_are_refused(name, options, says):
    """Before, they were ignored, or predictions that do not cover them were said to fail."""
    with pytest.raises(NormLabError, match=says) as raised:
        experiments.run(name, **options)
    assert "\n" not in str(raised.value)


def test_every_option_that_an_experiment_reads_exists():
    known = {spec.name for spec in dataclasses.fields(SimulateConfig)}
    for experiment in experiments.EXPERIMENTS.values():
        assert set(experiment.reads) <= known
        assert experiment.defaults.method in experiment.methods


def test_a_verdict_can_fail():
    good, bad = judge_prediction("x", "rate", -2.0001, -2.0, 1e-3), judge_prediction("x", "rate", -1.9, -2.0, 1e-3)
    assert (good.agrees, bad.agrees) == (True, False)
    assert judge_prediction("x", "rate", math.nan, -2.0, 1.0).agrees is False
    assert judge_prediction("x", "rate", 1.0, None, 1.0).agrees is None
    assert "not as predicted" in bad.sentence
    assert judge_prediction("x", "rate", -1.9, -2.0, 0.06, relative=True).agrees


@pytest.mark.full
def test_speed_laws_know_the_closed_forms_of_the_table():
    """ρ̇(0) = 2/(e^β + n − 1) for Post, Pre, Mix, √; with √(e^{2β} + n − 1) for Peri, nGPT; over r₀ for Pre, Peri."""
    n, beta = 8, 1.0
    slow, fast = 2 / (math.exp(beta) + n - 1), 2 / math.sqrt(math.exp(2 * beta) + n - 1)
    names = experiments.PAPER_LAWS
    expected = dict(zip(names, (slow, slow / 2, slow, fast / 2, fast, slow), strict=True))
    tails = dict(zip(names, (-2, -2, -2, -2, -2, -4), strict=True))
    found = experiments.run("speed-laws", scheme=names, tokens=n, dim=n, beta=beta, radius=2.0, looks=10)
    for verdict in found.verdicts:
        if verdict.quantity == "initial velocity":
            assert verdict.measured == pytest.approx(expected[verdict.subject], rel=1e-4)
        elif verdict.quantity.startswith("tail"):
            assert verdict.measured == pytest.approx(tails[verdict.subject], rel=1e-4)
            assert verdict.low is not None
            assert verdict.high is not None
            assert verdict.high - verdict.low < 1e-2


def test_a_tail_without_a_prediction_is_fitted_and_not_judged():
    """Output-Norm's speed depends on the radius in a way for which no tail is known."""
    found = experiments.run("speed-laws", scheme=("output",), tokens=4, dim=4, looks=10)
    (tail,) = [verdict for verdict in found.verdicts if verdict.quantity.startswith("tail")]
    assert tail.predicted is None
    assert tail.agrees is None
    assert tail.measured < 0.0


@pytest.mark.parametrize("name", ["post", "pre", "peri"])
def test_the_circle_is_the_plane_of_the_full_flow(name):
    """Particles with weights against as many tokens at the same places."""
    angles = torch.tensor([0.1, 0.5, 2.0, 4.0], dtype=torch.float64)
    masses, law = torch.tensor([1.0, 3.0, 2.0, 1.0], dtype=torch.float64), laws.find_law(name, 8)
    attention = ParticleAttention(beta=torch.tensor([3.0], dtype=torch.float64))

    def state(around: torch.Tensor) -> ParticleState:
        theta = torch.stack([around.cos(), around.sin()], -1).unsqueeze(0)
        return ParticleState(
            theta, torch.full(theta.shape[:2], 1.5, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        )

    heavy = metastability.CircleFlow(law, attention, mass=masses)(state(angles))
    many = angles.repeat_interleave(masses.long())
    full = Flow(law, attention)(state(many))
    first = torch.tensor([0, 1, 4, 6])
    assert heavy.theta.numpy() == pytest.approx(full.theta[:, first].numpy(), abs=1e-14)
    assert heavy.radius.numpy() == pytest.approx(full.radius[:, first].numpy(), abs=1e-14)


def test_tiny_pulls_keep_their_digits():
    """Two clusters a radian apart at β = 100: the pull, 10⁻²⁰ of the token, would vanish in A − ⟨θ, A⟩ θ."""
    angles = torch.tensor([0.0, 1.0], dtype=torch.float64)
    theta = torch.stack([angles.cos(), angles.sin()], -1).unsqueeze(0)
    state = ParticleState(theta, torch.ones(1, 2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    attention = ParticleAttention(beta=torch.tensor([100.0], dtype=torch.float64))
    speeds = metastability.CircleFlow(laws.find_law("post", 1), attention, mass=torch.ones(2).double()).speeds(state)
    pull = math.exp(-100 * (1 - math.cos(1.0)))
    assert speeds[0].tolist() == pytest.approx([math.sin(1.0) * pull] * 2, rel=1e-12, abs=0.0)


def test_the_staircase_goes_down_to_one_and_keeps_all_weight():
    config = experiments.EXPERIMENTS["metastability"].defaults.replace(tokens=9, beta=20.0, time=1e30)
    stands = list(metastability._snapshots(config, laws.find_law("post", 1), lambda *_: None))
    counts = [stand.count for stand in stands]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1
    assert all(stand.masses.sum() == 9 for stand in stands)


def test_parking_is_greedy():
    places = np.array([0.0, 0.4, 1.1, 0.9, 3.0])
    angles = abs(places[:, None] - places)
    assert causal._parked(angles, 1.0) == 3
    assert causal._parked(angles, 0.05) == 5
    assert causal._parked(angles, 10.0) == 1


@pytest.mark.parametrize("dim", [2, 4])
def test_leaders_fill_the_sphere_of_their_dimension(dim):
    """Caps of radius c/√β: a sphere of d − 1 dimensions takes β^((d − 1)/2) of them."""
    found = experiments.run("causal", dim=dim, tokens=200, beta=(3.0, 6.0, 12.0), time=2.0, step=0.5)
    assert found.verdicts[0].predicted == (dim - 1) / 2
    assert found.columns[-1] == f"leaders / β^{(dim - 1) / 2:g}"


def test_crossings_are_between_looks():
    times = np.array([0.0, 1.0, 2.0])
    assert phases.crossing_time(times, np.array([0.0, 0.2, 0.8]), 0.5) == pytest.approx(1.5)
    assert phases.crossing_time(times, np.array([0.6, 0.7, 0.8]), 0.5) == 0.0
    assert math.isnan(phases.crossing_time(times, np.zeros(3), 0.5))


def test_the_mixing_of_a_softmax():
    """Equal logits mix n tokens evenly; with many of them n Σp² is e^{σ²} and Σpg is σ, as log-normal moments say."""
    draws = functools.partial(random_weights._mixing, drawn=np.random.default_rng(0))
    assert draws(0.0, 25, math.inf) == pytest.approx(np.full(1000, 0.04))
    assert draws(0.5, 4000, math.inf).mean() == pytest.approx(math.exp(0.25) / 4000, rel=0.01)
    assert draws(0.5, 4000, 1).mean() == pytest.approx(0.25, rel=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": ("post", "pre"), "heads": 4, "beta": 40.0},
        {"scheme": ("post", "pre"), "heads": 16, "beta": 40.0},
        {"scheme": ("none", "output", "gated", "lns"), "radius": 2.0},
    ],
    ids=["4 heads", "16 heads", "laws that read other lengths"],
)
def test_random_weights_start_at_the_speed_of_their_heads_and_of_what_they_read(options):
    found = experiments.run("random-weights", tokens=64, dim=128, seeds=4, time=1.0, looks=2, step=0.1, **options)
    assert len(found.verdicts) == len(options["scheme"])
    assert found.agrees, [verdict.sentence for verdict in found.verdicts]


@pytest.mark.parametrize(
    "options",
    [{"weights": "identity"}, {"weights": "symmetric"}, {"causal": True}, {"mlp": 8}, {"kind": "unnormalised"},
     {"start": "clustered"}],
)  # fmt: skip
def test_no_speed_is_predicted_where_the_theory_of_random_weights_does_not_hold(options):
    small = {"scheme": "post", "tokens": 16, "dim": 16, "seeds": 1, "time": 1.0, "looks": 2, "method": "dopri"}
    found = experiments.run("random-weights", **small, **options)
    assert [verdict.predicted for verdict in found.verdicts] == [None]


@parametrize(
    "scheme", ["pre", "post", "peri", "geonorm", "keel", "deepnorm", "lns", "mix"], quick=["pre", "geonorm", "mix"]
)
def test_a_network_of_attention_alone_is_its_simulation(scheme, monkeypatch):
    """With MLPs that return nothing and all positions alike, the scheme's blocks over the weights that were read are
    the network itself: every observable agrees to the network's single precision.
    """
    config = experiments.EXPERIMENTS["real-model"].defaults.replace(scheme=(scheme,), tokens=12, seeds=2)
    target = resolve(scheme, length=12, batch_size=2, depth=4)
    bare = _without_mlp(target.build(seed=0))
    target.build = lambda **_: bare  # type: ignore[method-assign]
    monkeypatch.setattr(real_model, "_target", lambda _: target)
    monkeypatch.setattr(tokens, "rotary_table", lambda at, *rest, **more: rotary_table(0 * at, *rest, **more))
    found = experiments.EXPERIMENTS["real-model"].run(config)
    distances = {row[0]: row[5] for row in found.rows if row[1] == "blocks"}
    assert all(distance < 1e-4 for distance in distances.values()), distances


def test_a_published_architecture_is_near_its_simulation(tmp_path):
    """A Llama with fresh weights: MLPs start small, so that attention alone says nearly all."""
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": 64, "vocab_size": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(kind | sizes))
    found = experiments.run("real-model", model=str(path), tokens=16, seeds=2)
    relative = {row[0]: row[5] for row in found.rows if row[1] == "blocks"}
    assert all(0 < distance < 0.1 for distance in relative.values()), relative
    assert any("rotary" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["a run", "a published model"])
def test_trained_weights_are_those_of_the_folder(kind, tmp_path, monkeypatch):
    """Not those that a fresh network of this design has: with its outputs at zero nothing moves."""
    folder = (_trained if kind == "a run" else _published)(tmp_path, monkeypatch)
    found = experiments.run("real-model", model=str(folder), scheme="pre", tokens=12, seeds=2)
    assert f"2 blocks, width 32, 4 heads, β = {32 / math.sqrt(8):.4g}" in found.notes[0]
    figure = next(figure for figure in found.figures if figure.title == OBSERVABLE_LABELS["cosine"])
    names = [curve.name for curve in figure.curves]
    assert names[1:] == ["simulation: law", "simulation: blocks"]
    assert [len(curve.x) for curve in figure.curves] == [3, 3, 3]
    # All begin with the states that enter the network's first block.
    first = figure.curves[0].y[0]
    assert [curve.y[0] for curve in figure.curves] == pytest.approx([first] * 3, abs=1e-12)
    _silence(folder / "model.safetensors")
    still = experiments.run("real-model", model=str(folder), scheme="pre", tokens=12, seeds=2)
    curves = next(figure for figure in still.figures if figure.title == OBSERVABLE_LABELS["cosine"]).curves
    assert all(curve.y == pytest.approx([first] * 3, abs=1e-6) for curve in curves)
    relative = {row[0]: row[5] for row in found.rows if row[1] == "blocks"}
    assert all(distance is not None and 0 <= distance < 1.0 for distance in relative.values()), relative


def _silence(path):
    """Outputs of attention and MLPs put to zero."""
    with safetensors.safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    for name, tensor in tensors.items():
        if any(part in name for part in ("o_proj", "out.weight", "down")):
            tensor.zero_()
    safetensors.torch.save_file(tensors, path, metadata=metadata)


def _trained(root, monkeypatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(root / "cache"))
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    model = normlab.DecoderConfig(scheme="pre", depth=2, dim=32, heads=4)
    data = {"data": (str(root / "text.txt"),), "length": 32, "batch": 4, "tokens": 1024}
    config = normlab.TrainConfig(model=model, evals=1, saves=0, base_dim=16, **data)
    assert train(config, root / "run", progress=False).state == "done"
    return root / "run"


def _published(root, monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=64, intermediate_size=64,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(root / "llama")
    return root / "llama"


def test_a_published_model_needs_its_blocks_alone(tmp_path):
    """BERT for masked tokens is saved without the pooling layer that the plain model has, and attention is all here."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=64, pad_token_id=0, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    roles = {"pooler.dense.weight": "up"}
    assert read_attention(tmp_path, roles).depth == 2
    file = tmp_path / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    lost = {name for name in weights if ".layer.1.attention.self.query" in name}
    kept = {name: value for name, value in weights.items() if name not in lost}
    safetensors.torch.save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(NormLabError, match="lacks 2 weights"):
        read_attention(tmp_path, roles)


def _without_mlp(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "down" in name:
                parameter.zero_()
    return model


def test_random_weights_are_as_warm_as_their_dimension_asks_for():
    """β = √d unless it is given, so that logits spread alike in every dimension."""
    small = {"scheme": "post", "tokens": 32, "seeds": 1, "time": 1.0, "looks": 2}
    found = experiments.run("random-weights", dim=64, **small)
    assert found.config["beta"] == [8.0]
    assert experiments.run("random-weights", dim=64, beta=3.0, **small).config["beta"] == [3.0]
    assert experiments.EXPERIMENTS["random-weights"].defaults.beta == (512**0.5,)
    assert "one head" in found.notes[0]
    assert "one seed" in found.notes[0]
