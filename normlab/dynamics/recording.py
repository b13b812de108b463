"""Run simulations in chunks and record observables, histograms and token paths along each trajectory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from normlab.dynamics.config import Observable, SimulateConfig
from normlab.dynamics.measure.observables import StateView, measure_observables
from normlab.dynamics.measure.pairs import cosine_histogram
from normlab.dynamics.progress import ProgressCallback, no_progress
from normlab.dynamics.system import laws, small_systems
from normlab.dynamics.system.drift import RandomMLP
from normlab.dynamics.system.flow import Flow, LayerAttention, ParticleState
from normlab.dynamics.system.network import ParticleNetwork
from normlab.dynamics.system.small_systems import limit_threads
from normlab.dynamics.system.systems import (
    SystemChunk,
    initial_state,
    make_integrator,
    resolve_device,
    sample_times,
    system_chunks,
    torch_dtype,
)
from normlab.dynamics.system.weights import RandomWeights, Weights, make_attention
from normlab.errors import NormLabError
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.scheme import Scheme

LawSpec = str | Scheme | Law
"""Anything that can be simulated: the name of a scheme or law, or the object itself."""


def law_label(spec: LawSpec) -> str:
    """Name of a law in tables."""
    scheme = laws.scheme_of(spec)
    return "law" if isinstance(spec, Law) else str(spec) if scheme is None else scheme.label


@dataclass
class Recording:
    """Observables, histograms and paths recorded from all systems of one law."""

    times: np.ndarray
    values: dict[str, np.ndarray]
    """Observable → array (times, β, seeds)."""
    histogram: np.ndarray | None
    """Share of token pairs by cosine: (times, β, bins), mean over seeds."""
    paths: np.ndarray | None
    """Positions of some tokens of the first seed, for plots: (times, β, tokens, d)."""


def record_law(
    config: SimulateConfig,
    spec: LawSpec,
    *,
    observables: Iterable[Observable] | None = None,
    times: list[float] | None = None,
    tell: ProgressCallback = no_progress,
) -> Recording:
    """Simulate one law and record it at `times`, or at evenly spaced times if none are given."""
    return record_laws(config, [spec], observables=observables, times=times, tell=tell)[0]


def record_laws(
    config: SimulateConfig,
    specs: Sequence[LawSpec],
    *,
    observables: Iterable[Observable] | None = None,
    times: list[float] | None = None,
    matrices: Weights | None = None,
    tell: ProgressCallback = no_progress,
) -> list[Recording]:
    """Simulate several laws from the same initial tokens; small systems of several laws share a batch.

    `matrices` replaces the weights that the configuration would draw, for all systems.
    """
    moments = times or sample_times(config)
    books = [_Recorder(config, observables, moments) for _ in specs]
    passed, total = 0, len(specs) * len(moments) * len(config.beta) * config.seeds
    for places in small_systems.batch_groups(config, [laws.find_law(spec, config.layers) for spec in specs]):
        chosen, done = [specs[place] for place in places], 0
        names = ", ".join(map(law_label, chosen))
        for chunk in system_chunks(config):
            for look, states in enumerate(trajectories(config, chosen, chunk, moments, matrices)):
                for place, (state, flow) in zip(places, states, strict=True):
                    books[place].write(look, done, state, flow)
                passed += len(chunk) * len(places)
                tell(names, passed / total)
            done += len(chunk)
    return [book.record() for book in books]


def trajectory(
    config: SimulateConfig, spec: LawSpec, chunk: SystemChunk, times: list[float]
) -> Iterator[tuple[ParticleState, Flow]]:
    """Yield the state of the systems of `chunk` at each time, with the flow that moves them."""
    return (states[0] for states in trajectories(config, [spec], chunk, times))


def trajectories(
    config: SimulateConfig,
    specs: Sequence[LawSpec],
    chunk: SystemChunk,
    times: list[float],
    matrices: Weights | None = None,
) -> Iterator[list[tuple[ParticleState, Flow]]]:
    """Yield at each time, for each law, the state of the systems of `chunk` and the flow that moves them."""
    found = [laws.find_law(spec, config.layers) for spec in specs]
    every = SystemChunk(chunk.betas * len(specs), chunk.seeds * len(specs))
    flow, begin = (
        Flow(small_systems.join_laws(found), *_attention_and_mlp(config, every, matrices)),
        initial_state(config, every.seeds),
    )
    flows = [flow] if len(specs) == 1 else [Flow(law, *_attention_and_mlp(config, chunk, matrices)) for law in found]
    for state in _states(config, specs, flow, begin, times):
        parts = zip(*(part.chunk(len(specs)) for part in state), strict=True)
        yield [(ParticleState(*part), own) for part, own in zip(parts, flows, strict=True)]


def _attention_and_mlp(
    config: SimulateConfig, chunk: SystemChunk, matrices: Weights | None
) -> tuple[LayerAttention, RandomMLP | None]:
    """Attention and the random MLP (None without one) of the systems of `chunk`."""
    place = {"dtype": torch_dtype(config), "device": resolve_device(config)}
    weights = matrices or RandomWeights(
        matrices=config.weights, dim=config.dim, heads=config.heads, redraw=config.redraw, seeds=chunk.seeds, **place
    )
    beta = torch.tensor(chunk.betas, **place)
    attention = make_attention(weights, beta=beta, causal=config.causal, kind=config.kind)
    return attention, RandomMLP(dim=config.dim, hidden=config.mlp, seeds=chunk.seeds) if config.mlp else None


def _states(
    config: SimulateConfig, specs: Sequence[LawSpec], flow: Flow, begin: ParticleState, times: list[float]
) -> Iterator[ParticleState]:
    """States at `times`, from the integrated law or, with the method network, from the scheme's own blocks."""
    if config.method != "network":
        return make_integrator(config).orbit(flow, begin, times)
    scheme = laws.scheme_of(specs[0])
    if scheme is None:
        raise NormLabError(f"{law_label(specs[0])} is a law without a block, so it has no network; try rk4")
    network = ParticleNetwork(scheme, flow.attention, depth=config.layers, cut=config.cut, drift=flow.drift)
    return network.orbit(begin, times)


class _Recorder:
    """Arrays that a `Recording` is filled into. Allocated at the start: small arrays among the integrator's own
    would fragment memory.
    """

    def __init__(self, config: SimulateConfig, observables: Iterable[Observable] | None, times: list[float]):
        self.config, self.times = config, times
        self.names = tuple(config.observables if observables is None else observables)
        self.systems, looks = len(config.beta) * config.seeds, len(times)
        self.values = np.zeros((len(self.names), looks, self.systems))
        self.bars = np.zeros((looks, len(config.beta), config.bins))
        drawn = min(config.shown, config.tokens)
        self.paths = np.zeros((looks, len(config.beta), drawn, config.dim), dtype=np.float32)

    @torch.no_grad()
    def write(self, look: int, first: int, state: ParticleState, flow: Flow) -> None:
        """Record the state at time index `look` of the systems that start at index `first`."""
        with limit_threads(state.theta):
            found = measure_observables(StateView(state, flow, self.config.angle), self.names)
        for row, name in zip(self.values, self.names, strict=True):
            row[look, first : first + len(state.time)] = found[name].cpu().numpy()
        places = [divmod(first + k, self.config.seeds) for k in range(len(state.time))]
        if self.config.bins:
            shares = cosine_histogram(state.theta, self.config.bins).cpu().numpy() / self.config.seeds
            np.add.at(self.bars[look], [beta for beta, _ in places], shares)
        if self.config.shown:
            drawn = [k for k, (_, seed) in enumerate(places) if seed == 0]
            kept = state.theta[drawn, : self.config.shown].float().cpu().numpy()
            self.paths[look, [places[k][0] for k in drawn]] = kept

    def record(self) -> Recording:
        shape = (len(self.times), len(self.config.beta), self.config.seeds)
        return Recording(
            times=np.asarray(self.times),
            values={name: row.reshape(shape) for name, row in zip(self.names, self.values, strict=True)},
            histogram=self.bars if self.config.bins else None,
            paths=self.paths if self.config.shown else None,
        )
