"""Observables against their definitions over all pairs, against scipy, and at the ends of what they can be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.sparse.csgraph import connected_components
from scipy.special import logsumexp

from normlab.dynamics.config import OBSERVABLE_LABELS, OBSERVABLES
from normlab.dynamics.measure import pairs
from normlab.dynamics.measure.clusters import cluster_labels, cluster_merges, count_clusters
from normlab.dynamics.measure.observables import StateView, measure_observables
from normlab.dynamics.system.attention import ParticleAttention
from normlab.dynamics.system.flow import Flow, ParticleState, unit
from normlab.dynamics.system.integrators import RungeKutta4
from normlab.errors import NormLabError
from normlab.probes import measures
from normlab.schemes.catalog.registry import scheme
from tests.matrix import parametrize

EPS = torch.finfo(torch.float64).eps


def tokens(systems: int = 3, count: int = 17, dim: int = 4, dtype: torch.dtype = torch.float64) -> ParticleState:
    theta = unit(torch.randn(systems, count, dim, dtype=dtype))
    return ParticleState(theta, 1 + torch.rand(systems, count, dtype=dtype), torch.zeros(systems, dtype=dtype))


def flow(beta: float | list[float] = 2.0, name: str = "post", score: torch.Tensor | None = None) -> Flow:
    return Flow(
        scheme(name).law(8), ParticleAttention(beta=torch.tensor(beta, dtype=torch.float64).reshape(-1), score=score)
    )


def see(state: ParticleState, *names, **options) -> dict[str, torch.Tensor]:
    return measure_observables(StateView(state, options.pop("moved_by", flow()), **options), names or OBSERVABLES)


def cosines(state: ParticleState) -> np.ndarray:
    """(S, pairs) of all j ≠ k."""
    theta = state.theta.double().numpy()
    products = theta @ theta.transpose(0, 2, 1)
    return products[:, ~np.eye(theta.shape[1], dtype=bool)]


def test_every_observable_is_one_number_for_each_system_and_has_a_name():
    state = tokens()
    found = see(state)
    assert list(found) == list(OBSERVABLES) == list(OBSERVABLE_LABELS)
    assert all(value.shape == (3,) and value.dtype == torch.float64 for value in found.values())


def test_cosine_variance_and_order_follow_from_all_pairs():
    state = tokens()
    found, theta = see(state), state.theta.numpy()
    assert found["cosine"].numpy() == pytest.approx(cosines(state).mean(-1), abs=64 * EPS)
    centre = theta.mean(1, keepdims=True)
    assert found["variance"].numpy() == pytest.approx(((theta - centre) ** 2).sum(-1).mean(-1), abs=64 * EPS)
    assert found["order"].numpy() == pytest.approx(np.linalg.norm(centre[:, 0], axis=-1), abs=64 * EPS)


def test_variance_keeps_its_digits_where_cosines_have_none():
    apart = 1e-12
    theta = torch.tensor([[[1.0, apart], [1.0, -apart]]], dtype=torch.float64)
    state = ParticleState(unit(theta), torch.ones(1, 2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    assert see(state, "variance")["variance"].item() == pytest.approx(apart**2, rel=1e-9)
    assert see(state, "cosine")["cosine"].item() == 1.0


@pytest.mark.parametrize("beta", [0.0, 1e-3, 2.0, 800.0])
def test_energy_is_the_logarithm_of_the_mean_over_pairs(beta):
    state = tokens()
    theta = state.theta.numpy()
    products = (theta @ theta.transpose(0, 2, 1)).reshape(3, -1)
    expected = -products.mean(-1) if beta == 0 else -(logsumexp(beta * products, axis=-1) - math.log(17**2)) / beta
    # At small β the logarithm is of something close to one, and 1/β enlarges what it is rounded by.
    tolerance = 64 * EPS * (1 + 1 / beta if beta else 1)
    assert see(state, "energy", moved_by=flow(beta))["energy"].numpy() == pytest.approx(expected, abs=tolerance)


def test_energy_of_each_system_has_its_own_beta_and_its_matrices():
    state, score = tokens(systems=2), torch.randn(2, 2, 4, 4, dtype=torch.float64)
    found = see(state, "energy", moved_by=flow([0.5, 3.0], score=score))["energy"]
    for system, beta in enumerate([0.5, 3.0]):
        theta = state.theta[system].numpy()
        heads = [logsumexp(beta * theta @ score[system, head].numpy() @ theta.T) for head in range(2)]
        assert found[system].item() == pytest.approx(-np.mean([h - math.log(17**2) for h in heads]) / beta, abs=1e-13)


@parametrize("name", ["post", "pre", "peri", "ngpt", "geonorm", "spannorm"], quick=["pre", "ngpt", "geonorm"])
def test_energy_never_rises(name):
    state = tokens(systems=2)._replace(radius=torch.ones(2, 17, dtype=torch.float64))
    moved_by = flow(4.0, name)
    path = RungeKutta4(step=0.05).orbit(moved_by, state, [0.1 * k for k in range(60)])
    energies = torch.stack([see(at, "energy", moved_by=moved_by)["energy"] for at in path])
    assert (energies.diff(dim=0) <= 16 * EPS).all()


def test_rank_is_that_of_the_stability_check():
    state = tokens(systems=2, count=9, dim=5)
    expected = [measures.ranks(measures.gram(theta))[0] for theta in state.theta]
    assert see(state, "rank")["rank"].tolist() == pytest.approx(expected, rel=1e-10)
    same = state._replace(theta=state.theta[:, :1].expand(-1, 9, -1))
    assert see(same, "rank")["rank"].tolist() == pytest.approx([1.0, 1.0], abs=1e-5)


def test_radii_and_speeds_are_over_tokens():
    state, moved_by = tokens(), flow(name="pre")
    found, speeds = see(state, moved_by=moved_by), moved_by.speeds(state)
    assert torch.equal(found["smallest"], state.radius.amin(-1))
    assert torch.equal(found["largest"], state.radius.amax(-1))
    assert torch.equal(found["fastest"], speeds.amax(-1))
    assert found["speed"].tolist() == pytest.approx(speeds.mean(-1).tolist())


def test_shares_and_histogram_count_pairs():
    state = tokens(count=40, dim=2)
    expected = (cosines(state) > 0.999).mean(-1)
    assert see(state, "close")["close"].numpy() == pytest.approx(expected, abs=1e-15)
    bars = pairs.cosine_histogram(state.theta, 20)
    for system, all_pairs in enumerate(cosines(state)):
        counts, _ = np.histogram(np.clip(all_pairs, -1, 1), bins=20, range=(-1, 1))
        assert bars[system].numpy() == pytest.approx(counts / counts.sum(), abs=1e-15)


def test_pairs_in_tiles_are_the_same(monkeypatch):
    state = tokens(count=33)
    whole = {**see(state), "bars": pairs.cosine_histogram(state.theta, 10)}
    monkeypatch.setattr(pairs, "_PAIRS", 100)
    tiled = {**see(state), "bars": pairs.cosine_histogram(state.theta, 10)}
    for name, value in whole.items():
        assert tiled[name].numpy() == pytest.approx(value.numpy(), abs=1e-12), name


def test_no_tile_holds_all_pairs_of_many_tokens():
    theta = tokens(systems=1, count=5000, dtype=torch.float32).theta
    sizes = [(rows, products.numel()) for rows, products in pairs.pair_tiles(theta)]
    assert max(size for _, size in sizes) <= 2**22 < 5000**2
    assert [k for rows, _ in sizes for k in range(5000)[rows]] == list(range(5000))


@pytest.mark.parametrize("angle", [1e-3, 0.02, 0.1, 0.5, 3.0])
@pytest.mark.parametrize("dim", [2, 3])
def test_clusters_are_connected_components(angle, dim):
    state = tokens(systems=4, count=120, dim=dim)
    found = cluster_labels(state.theta, angle)
    for system, theta in enumerate(state.theta.numpy()):
        near = theta @ theta.T >= math.cos(angle)
        count, groups = connected_components(near | np.eye(120, dtype=bool))
        assert count_clusters(state.theta, angle)[system] == count
        # The same partition: each of ours lies in one of theirs, and there are as many.
        assert len(set(zip(found[system].tolist(), groups.tolist(), strict=True))) == count


def test_a_chain_is_one_cluster_whatever_the_order():
    """The worst case for propagating labels: a thousand links, in random order."""
    around = torch.linspace(0, 3.0, 1000, dtype=torch.float64)[torch.randperm(1000)]
    theta = torch.stack([around.cos(), around.sin()], -1).unsqueeze(0)
    assert count_clusters(theta, 0.0031).item() == 1
    assert count_clusters(theta, 0.0029).item() == 1000


def test_merges_are_the_looks_with_fewer_clusters_than_ever():
    assert cluster_merges([0.0, 1.0, 2.0, 3.0, 4.0], [5, 5, 3, 4, 1]) == [(2.0, 3), (4.0, 1)]
    assert cluster_merges([0.0], [5]) == []


def test_float32_and_float64_agree():
    state = tokens()
    single = ParticleState(*(part.float() for part in state))
    moved_by, wide = flow(2.0), see(state)
    moved_by32 = Flow(moved_by.law, ParticleAttention(beta=torch.tensor([2.0])))
    for name, value in see(single, moved_by=moved_by32).items():
        assert value.numpy() == pytest.approx(wide[name].numpy(), rel=1e-4, abs=1e-5), name


def test_bad_input_is_one_line():
    state = tokens()
    with pytest.raises(NormLabError, match="unknown observable 'cosin'; did you mean 'cosine'"):
        measure_observables(StateView(state), ["cosin"])  # type: ignore[list-item]
    with pytest.raises(NormLabError, match="need a flow"):
        measure_observables(StateView(state), ["speed"])
    with pytest.raises(NormLabError, match=r"lies in \(0, π\)"):
        count_clusters(state.theta, 0.0)
