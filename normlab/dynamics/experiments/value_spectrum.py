"""Experiment value-spectrum: limits of the tokens by the eigenvalues of V, without normalisation (arXiv 2305.05465).

Tokens grow like e^{tV}; the rescaled tokens z = e^{−tV} x converge. As tokens grow, softmax attention approaches a
hard maximum. With V = 1 the limits are vertices of a polytope; with a simple largest eigenvalue they lie on at most
three parallel hyperplanes; with a multiple one they are vertices of a polytope in its eigenspace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments.result import Findings, PredictionVerdict, judge_prediction
from normlab.dynamics.progress import ProgressCallback
from normlab.dynamics.system import laws
from normlab.dynamics.system.flow import Flow
from normlab.dynamics.system.systems import initial_state, make_integrator, resolve_device, sample_times, torch_dtype
from normlab.dynamics.system.weights import fixed_weights, make_attention
from normlab.dynamics.view.figures import Figure, make_curve
from normlab.errors import NormLabError
from normlab.schemes.contract.law import Law

_LIMIT = 0.02
_DRAWN = 24
"""Number of tokens in the figure."""
_MULTIPLICITY = {"identity": None, "simple": 1, "double": 2}
"""Multiplicity of the largest eigenvalue; None: all are equal."""


def run(config: SimulateConfig, tell: ProgressCallback) -> Findings:
    """Simulate three spectra of V from the same tokens."""
    spec = config.scheme[0]
    law = laws.find_law(spec, config.layers)
    if not law.reads_state:
        raise NormLabError(f"value-spectrum is about tokens that nothing normalises; {spec} does; try none")
    figures, rows, verdicts = [], [], []
    for place, (name, multiplicity) in enumerate(_MULTIPLICITY.items()):
        tell(name, place / len(_MULTIPLICITY))
        spectrum, axes = _spectrum(config, multiplicity)
        top = axes[:, : multiplicity or config.dim]
        heights, last = _orbit(config, law, spectrum, axes, top)
        verdict = _judge(name, last)
        verdicts.append(verdict)
        rows.append((name, multiplicity or config.dim, _distinct(last), verdict.measured))
        figures.append(_figure(name, sample_times(config), heights))
    return Findings(
        figures=tuple(figures),
        columns=("spectrum of V", "multiplicity of its largest", "places where tokens rest", "distance from corners"),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        notes=(
            f"{config.tokens} tokens in dimension {config.dim}, Q = K = 1, V symmetric with largest eigenvalue 1 and "
            f"the others spread evenly over [−0.5, 0.5]; rescaled tokens at time {config.time:g}, seen in the "
            "eigenspace of the largest eigenvalue",
            "distance from corners: the largest relative gap between ⟨z_j, z_j⟩ and the largest ⟨z_j, z_k⟩",
        ),
    )


def _spectrum(config: SimulateConfig, multiplicity: int | None) -> tuple[Tensor, Tensor]:
    """Eigenvalues, largest first, and a random orthonormal basis."""
    top = multiplicity or config.dim
    rest = torch.linspace(0.5, -0.5, max(config.dim - top, 1), dtype=torch.float64)[: config.dim - top]
    noise = torch.randn(
        config.dim, config.dim, generator=torch.Generator().manual_seed(config.seed), dtype=torch.float64
    )
    return torch.cat([torch.ones(top, dtype=torch.float64), rest]), torch.linalg.qr(noise).Q


def _orbit(config: SimulateConfig, law: Law, spectrum: Tensor, axes: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """First coordinate of the rescaled tokens at all recorded times, and their top eigenspace part at the last."""
    begin = initial_state(config, (config.seed,))
    value = (axes * spectrum) @ axes.mT
    beta = torch.tensor([config.beta[0]], dtype=torch_dtype(config), device=resolve_device(config))
    attention = make_attention(fixed_weights(value=value.to(beta)), beta=beta, causal=config.causal, kind=config.kind)
    heights, found = [], None
    for state in make_integrator(config).orbit(Flow(law, attention), begin, sample_times(config)):
        tokens = (state.radius.unsqueeze(-1) * state.theta)[0].double().cpu()
        # In the top eigenspace e^{−tV} is a scalar.
        found = (tokens @ top) * torch.exp(-state.time[0].double().cpu())
        heights.append(found[:, 0])
    assert found is not None
    return torch.stack(heights), found


def _judge(name: str, rescaled: Tensor) -> PredictionVerdict:
    """At a vertex of the polytope ⟨z_j, z_j⟩ is the largest of all ⟨z_j, z_k⟩."""
    products = rescaled @ rescaled.mT
    largest = products.amax(-1)
    moving = largest > 1e-3 * largest.amax()
    gap = ((largest - products.diagonal()) / largest)[moving]
    return judge_prediction(name, "distance from corners", float(gap.max()), 0.0, _LIMIT)


def _distinct(rescaled: Tensor) -> float:
    """Number of limit points, where points closer than a hundredth of the largest token count as one."""
    left, count = rescaled, 0
    near = 0.01 * torch.linalg.vector_norm(rescaled, dim=-1).amax()
    while len(left):
        left = left[torch.linalg.vector_norm(left - left[0], dim=-1) > near]
        count += 1
    return float(count)


def _figure(name: str, times: list[float], heights: Tensor) -> Figure:
    return Figure(
        title=f"{name}: first coordinate of the rescaled tokens",
        x_label="time",
        y_label="coordinate",
        curves=tuple(
            make_curve(f"token {k}", times, heights[:, k].tolist()) for k in range(min(_DRAWN, heights.shape[1]))
        ),
    )
