"""Observables of a state: mean cosine, variance, energy, clusters, effective rank, speed, radius, ...

Each is a function of a `StateView` and returns one number per system; shared intermediate results are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from normlab.dynamics.config import OBSERVABLES, Observable
from normlab.dynamics.measure.clusters import count_clusters
from normlab.dynamics.measure.pairs import close_share, log_mean_exp
from normlab.dynamics.system.attention import num_heads, queries_and_keys
from normlab.dynamics.system.flow import Flow, ParticleState, attention_at
from normlab.errors import NormLabError, unknown
from normlab.probes import measures
from normlab.probes.hidden_state import spaced

CLOSE_COSINE = 0.999
"""Cosine above which two tokens count as merged."""


@dataclass
class StateView:
    """A state with cached intermediate results for observables."""

    state: ParticleState
    flow: Flow | None = None
    """Needed for speed and energy; without it only geometric observables are available."""
    angle: float = 0.1
    """Largest angle between neighbours of one cluster."""

    @cached_property
    def mean(self) -> Tensor:
        """Mean token θ̄, (S, d)."""
        return self.state.theta.mean(1)

    @cached_property
    def variance(self) -> Tensor:
        """mean ‖θ − θ̄‖², (S,); precise also where 1 − cos is lost to rounding."""
        return (self.state.theta - self.mean.unsqueeze(1)).square().sum(-1).mean(-1)

    @cached_property
    def speeds(self) -> Tensor:
        """Speeds ‖θ̇_j‖, (S, n)."""
        return self.required_flow.speeds(self.state)

    @cached_property
    def required_flow(self) -> Flow:
        if self.flow is None:
            raise NormLabError("speed and energy need a flow; a state alone has none")
        return self.flow


def measure_observables(view: StateView, names: Iterable[Observable]) -> dict[str, Tensor]:
    """Observable → values (S,) in double precision."""
    found = {}
    for name in names:
        if name not in OBSERVABLES:
            raise unknown("observable", name, OBSERVABLES)
        found[name] = _FUNCTIONS[name](view).double()
    return found


def cosine(view: StateView) -> Tensor:
    """Mean cosine over pairs of tokens, from the variance: Σ_{j≠k} cos = ‖Σθ‖² − n and Σ‖θ − θ̄‖² = n − ‖Σθ‖²/n."""
    tokens = view.state.theta.shape[1]
    return 1 - view.variance * (tokens / (tokens - 1))


def energy(view: StateView) -> Tensor:
    """−(1/β) log of the mean of e^{β⟨Qθ_j, Kθ_k⟩} over all pairs, mean over heads; −⟨Qθ̄, Kθ̄⟩ at β = 0.

    It never increases if V = QᵀK is symmetric and β is constant, for any scheme.
    """
    attention, theta = attention_at(view.required_flow.attention, view.state.time), view.state.theta
    beta = attention.beta.to(theta).expand(theta.shape[0])
    pairs = [queries_and_keys(attention.score, head, theta) for head in range(num_heads(attention.score))]
    return torch.stack([_energy(queries, keys, beta) for queries, keys in pairs]).mean(0)


def _energy(queries: Tensor, keys: Tensor, beta: Tensor) -> Tensor:
    at_zero = (queries.mean(1) * keys.mean(1)).sum(-1)
    warm = beta > 0
    return -torch.where(warm, log_mean_exp(queries, keys, beta) / torch.where(warm, beta, 1.0), at_zero)


def rank(view: StateView) -> Tensor:
    """Effective rank of at most 256 tokens: exponential of the spectral entropy of their Gram matrix."""
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
    "close": lambda view: close_share(view.state.theta, CLOSE_COSINE),
    "clusters": lambda view: count_clusters(view.state.theta, view.angle),
    "rank": rank,
    "speed": lambda view: view.speeds.mean(-1),
    "fastest": lambda view: view.speeds.amax(-1),
    "radius": lambda view: view.state.radius.mean(-1),
    "smallest": lambda view: view.state.radius.amin(-1),
    "largest": lambda view: view.state.radius.amax(-1),
}
