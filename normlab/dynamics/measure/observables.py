"""Observables: numbers that describe a state of many systems, taken as an orbit passes and kept in its place.

Each is a function of a `StateView`, one number for each system; what several of them need is worked out once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from normlab.dynamics.choices import OBSERVABLES, Observable
from normlab.dynamics.measure.clusters import clusters
from normlab.dynamics.measure.pairs import close_share, log_mean_exp
from normlab.dynamics.system.attention import heads, queries_and_keys
from normlab.dynamics.system.flow import Flow, ParticleState, at_layer
from normlab.errors import NormLabError, unknown
from normlab.probes import measures
from normlab.probes.hidden_state import spaced

CLOSE = 0.999
"""Cosine above which two tokens count as one in phase diagrams."""


@dataclass
class StateView:
    """One state, as it is looked at."""

    state: ParticleState
    flow: Flow | None = None
    """For what needs velocities or β; a state alone has geometry only."""
    angle: float = 0.1
    """Largest angle between neighbours in a cluster."""

    @cached_property
    def mean(self) -> Tensor:
        """(S, d) the mean token θ̄."""
        return self.state.theta.mean(1)

    @cached_property
    def variance(self) -> Tensor:
        """mean ‖θ − θ̄‖², which keeps its digits where 1 − cos has none left."""
        return (self.state.theta - self.mean.unsqueeze(1)).square().sum(-1).mean(-1)

    @cached_property
    def speeds(self) -> Tensor:
        """(S, n) ‖θ̇_j‖."""
        return self.moved_by.speeds(self.state)

    @cached_property
    def moved_by(self) -> Flow:
        if self.flow is None:
            raise NormLabError("speed and energy need a flow; a state alone has none")
        return self.flow


def take(view: StateView, names: Iterable[Observable]) -> dict[str, Tensor]:
    """(S,) for each of the observables, in double precision."""
    found = {}
    for name in names:
        if name not in OBSERVABLES:
            raise unknown("observable", name, OBSERVABLES)
        found[name] = _FUNCTIONS[name](view).double()
    return found


def cosine(view: StateView) -> Tensor:
    """Mean cosine of two tokens: the cosines of all pairs add up to ‖Σθ‖² − n, and Σ‖θ − θ̄‖² = n − ‖Σθ‖²/n."""
    tokens = view.state.theta.shape[1]
    return 1 - view.variance * (tokens / (tokens - 1))


def energy(view: StateView) -> Tensor:
    """−(1/β) log of the mean of e^{β⟨Qθ_j, Kθ_k⟩} over all pairs, mean over heads; −⟨Qθ̄, Kθ̄⟩ at β = 0.

    It never rises where V = QᵀK is symmetric and β is the same at all times, whatever the scheme.
    """
    attention, theta = at_layer(view.moved_by.attention, view.state.time), view.state.theta
    beta = attention.beta.to(theta).expand(theta.shape[0])
    pairs = [queries_and_keys(attention.score, head, theta) for head in range(heads(attention.score))]
    return torch.stack([_energy(queries, keys, beta) for queries, keys in pairs]).mean(0)


def _energy(queries: Tensor, keys: Tensor, beta: Tensor) -> Tensor:
    at_zero = (queries.mean(1) * keys.mean(1)).sum(-1)
    warm = beta > 0
    return -torch.where(warm, log_mean_exp(queries, keys, beta) / torch.where(warm, beta, 1.0), at_zero)


def rank(view: StateView) -> Tensor:
    """Effective rank of at most 256 tokens: the exponential of the entropy of their Gram matrix's spectrum."""
    theta, most = view.state.theta, measures.SAMPLE
    if theta.shape[1] > most:
        theta = theta[:, spaced(theta.shape[1], most, theta.device)]
    gram = theta @ theta.mT if theta.shape[1] <= theta.shape[2] else theta.mT @ theta
    return torch.vmap(measures.effective_rank)(torch.linalg.eigvalsh(gram).clamp_min(0.0))


_FUNCTIONS: dict[Observable, Callable[[StateView], Tensor]] = {
    "cosine": cosine,
    "variance": lambda view: view.variance,
    "order": lambda view: torch.linalg.vector_norm(view.mean, dim=-1),
    "energy": energy,
    "close": lambda view: close_share(view.state.theta, CLOSE),
    "clusters": lambda view: clusters(view.state.theta, view.angle),
    "rank": rank,
    "speed": lambda view: view.speeds.mean(-1),
    "fastest": lambda view: view.speeds.amax(-1),
    "radius": lambda view: view.state.radius.mean(-1),
    "smallest": lambda view: view.state.radius.amin(-1),
    "largest": lambda view: view.state.radius.amax(-1),
}
