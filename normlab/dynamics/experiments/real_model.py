"""Experiment real-model: observables of a real network, block by block, beside a simulation with its attention weights.

The simulation starts from the hidden states that enter the first block; block k covers the time from k to k + 1. It
contains attention and the scheme, but no MLPs and no positions. It is run twice: as the continuous law, with one
learnt number per constant and block, and through the scheme's own blocks, with all of their learnt parameters. The
difference between the two is the discretisation; the rest is due to MLPs and positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from normlab.dynamics.config import OBSERVABLE_LABELS, Observable, SimulateConfig
from normlab.dynamics.experiments.result import Findings, PredictionVerdict, judge_prediction
from normlab.dynamics.measure.observables import StateView, measure_observables
from normlab.dynamics.progress import ProgressCallback
from normlab.dynamics.system import laws
from normlab.dynamics.system.flow import Flow, ParticleState, unit
from normlab.dynamics.system.network import ParticleNetwork
from normlab.dynamics.system.read_weights import AttentionWeights, read_model_attention
from normlab.dynamics.system.systems import make_integrator, resolve_device
from normlab.dynamics.system.weights import make_attention
from normlab.dynamics.view.figures import Curve, Figure, Role, make_curve
from normlab.errors import NormLabError
from normlab.probes.blocks import BlockStack, find_stacks
from normlab.schemes.contract.law import Value
from normlab.schemes.contract.scheme import Scheme
from normlab.targets import Target, resolve
from normlab.utils.text import counted

_GEOMETRY: tuple[Observable, ...] = (
    "cosine", "variance", "order", "close", "clusters", "rank", "radius", "smallest", "largest"
)  # fmt: skip
"""Observables that need hidden states alone, so that they can be measured in a real network."""

Series = dict[str, np.ndarray]


def run(config: SimulateConfig, tell: ProgressCallback) -> Findings:
    """Compare the network `config.model`, or a freshly initialised one of the scheme, with its simulation."""
    wanted: list[Observable] = [name for name in _GEOMETRY if name in config.observables]
    if not wanted:
        raise NormLabError(f"real-model needs observables of states alone; try {','.join(_GEOMETRY[:3])}")
    target = _target(config)
    tell(f"{target.name}: the network", 0.1)
    model = target.build(seed=config.seed).eval()
    states = _states(target, model, config)
    found = read_model_attention(model)
    size = target.scheme.sphere(found.dim) if target.scheme else found.dim**0.5
    real = _series((_state(hidden, size, k) for k, hidden in enumerate(states)), wanted, config)
    tell(f"{target.name}: the simulation", 0.5)
    begin = _state(states[0], size, 0)
    simulated = {
        name: _series(orbit, wanted, config) for name, orbit in _orbits(config, target.scheme, found, begin).items()
    }
    times = [float(k) for k in range(len(states))]
    return Findings(
        figures=(
            *(_figure(name, target.name, times, real, simulated) for name in wanted),
            *_constants(found),
        ),
        columns=("observable", "simulation", "network, last block", "simulation, last block", "distance", "relative"),
        rows=tuple(_row(name, how, real, one) for name in wanted for how, one in simulated.items()),
        verdicts=tuple(_distance(name, how, real, one) for name in wanted for how, one in simulated.items()),
        notes=tuple(_notes(config, target, found)),
    )


def _target(config: SimulateConfig) -> Target:
    """The network as a target, with trained weights if it is a run folder or a published model."""
    named = config.model or config.scheme[0]
    trained = config.model is not None and not named.endswith(".json") and not _is_scheme(named)
    where = str(resolve_device(config))
    return resolve(
        named, weights=trained, data=config.data, length=config.tokens, batch_size=config.seeds, device=where
    )


def _is_scheme(name: str) -> bool:
    try:
        return not Path(name).exists() and laws.scheme_of(name) is not None
    except NormLabError:
        return False


def _notes(config: SimulateConfig, target: Target, found: AttentionWeights) -> Iterable[str]:
    sizes = f"{counted(found.depth, 'block')}, width {found.dim}, {counted(found.heads, 'head')}, β = {found.beta:.4g}"
    yield f"{target.name}: {sizes}; law of {target.scheme.label if target.scheme else config.scheme[0]}"
    yield from target.notes
    yield from (f"the law's {value.name} as learnt: {_range(value.blocks)}" for value in _learnt(found))
    yield from (f"not in the simulation: {what}" for what in found.left_out)
    yield "distance: mean over blocks of |network − simulation|; relative: over the mean size in the network"


@torch.no_grad()
def _states(target: Target, model: nn.Module, config: SimulateConfig) -> list[Tensor]:
    """Hidden states before the first block and after every block, each (sequences, tokens, d)."""
    stack, seen = find_stacks(model, target.blocks)[0], []
    with ExitStack() as hooks:
        _listen(stack, seen, hooks)
        target.loss(model, next(target.batches(config.seed)))
    hidden = target.scheme.hidden if target.scheme else _same
    return [hidden(state).double() for state in seen]


def _listen(stack: BlockStack, seen: list[Tensor], hooks: ExitStack) -> None:
    def enter(_block: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append(_tensor(args or tuple(kwargs.values())))

    def leave(_block: nn.Module, _args: tuple, output: object) -> None:
        seen.append(_tensor(output))

    hooks.callback(stack.blocks[0].register_forward_pre_hook(enter, with_kwargs=True).remove)
    for block in stack.blocks:
        hooks.callback(block.register_forward_hook(leave).remove)


def _tensor(value: object) -> Tensor:
    """The hidden state among a block's arguments or outputs: the first tensor."""
    found = value if isinstance(value, Tensor) else next((x for x in value if isinstance(x, Tensor)), None)  # type: ignore[attr-defined]
    if found is None:
        raise NormLabError("the blocks of this network return no tensor; expected hidden states first")
    return found.detach()


def _same(state: Tensor) -> Tensor:
    return state


def _state(hidden: Tensor, size: float, time: int) -> ParticleState:
    """Hidden states as a particle state; radii in units of the radius that norms project to."""
    radius = torch.linalg.vector_norm(hidden, dim=-1)
    return ParticleState(unit(hidden), radius / size, hidden.new_full((len(hidden),), float(time)))


def _orbits(
    config: SimulateConfig, scheme: Scheme | None, found: AttentionWeights, begin: ParticleState
) -> dict[str, Iterable[ParticleState]]:
    """Name in figures → states: the law in continuous time, and the scheme's own blocks."""
    options = {"beta": begin.radius.new_tensor([found.beta]), "causal": config.causal, "kind": config.kind}
    attention = make_attention(found.weights, **options)
    times = [float(k) for k in range(found.depth + 1)]
    law = found.law or laws.find_law(scheme or config.scheme[0], found.depth)
    orbits: dict[str, Iterable[ParticleState]] = {
        "law": make_integrator(config).orbit(Flow(law, attention), begin, times)
    }
    own = scheme or laws.scheme_of(config.scheme[0])
    if found.stack is not None:
        bare = make_attention(found.bare, **options)
        network = ParticleNetwork(found.stack.scheme, bare, depth=found.depth, learnt=found.blocks, entered=True)
        orbits["blocks"] = network.orbit(begin, times)
    elif own is not None:
        orbits["blocks"] = ParticleNetwork(own, attention, depth=found.depth).orbit(begin, times)
    return orbits


def _learnt(found: AttentionWeights) -> list[Value]:
    """Constants of the law that training changed."""
    return [value for value in found.law.values if value.moved] if found.law else []


def _constants(found: AttentionWeights) -> Iterable[Figure]:
    """Figures of the law's constants over blocks, for those that training changed."""
    blocks = [float(k) for k in range(found.depth)]
    for value in _learnt(found):
        lines = (
            make_curve("learnt", blocks, value.blocks, role="model"),
            make_curve("initial", blocks, [value.initial] * found.depth, role="theory"),
        )
        yield Figure(title=f"The law's {value.name}", x_label="block", y_label=value.name, curves=lines)


def _range(values: Sequence[float]) -> str:
    return f"{values[0]:.4g} in the first block, {values[-1]:.4g} in the last, {min(values):.4g} to {max(values):.4g}"


@torch.no_grad()
def _series(states: Iterable[ParticleState], wanted: list[Observable], config: SimulateConfig) -> Series:
    """Each observable before the first and after every block, mean over sequences."""
    looks = [measure_observables(StateView(state, angle=config.angle), wanted) for state in states]
    return {name: np.array([float(look[name].mean()) for look in looks]) for name in wanted}


def _figure(name: Observable, model: str, times: list[float], real: Series, simulated: dict[str, Series]) -> Figure:
    def line(label: str, values: Series, role: Role) -> Curve:
        return make_curve(label, times, values[name], role=role)

    return Figure(
        title=OBSERVABLE_LABELS[name],
        x_label="block",
        y_label=OBSERVABLE_LABELS[name],
        curves=(
            line(model, real, "model"),
            *(line(f"simulation: {how}", one, "data") for how, one in simulated.items()),
        ),
    )


def _row(name: str, how: str, real: Series, one: Series) -> tuple:
    apart, size = _apart(name, real, one)
    return (name, how, float(real[name][-1]), float(one[name][-1]), apart, apart / size if size else None)


def _distance(name: str, how: str, real: Series, one: Series) -> PredictionVerdict:
    """Report a distance without a prediction: theory does not cover MLPs and positions."""
    return judge_prediction(how, f"distance of {name} from the network's", _apart(name, real, one)[0], None, 0.0)


def _apart(name: str, real: Series, one: Series) -> tuple[float, float]:
    """Mean absolute difference over blocks, and mean absolute value in the network."""
    return float(abs(real[name] - one[name]).mean()), float(abs(real[name]).mean())
