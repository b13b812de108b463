"""Results made by hand, for the tests of their pages."""

from __future__ import annotations

import math
from typing import Any

from normlab.dynamics.experiments.result import ExperimentResult, judge_prediction
from normlab.dynamics.measure.fits import Rate
from normlab.dynamics.measure.tails import Tail
from normlab.dynamics.result import Band, FittedLaw, Merge, SchemeRun, Simulation
from normlab.dynamics.view.figures import Figure, make_curve, make_image

HOSTILE = "<script>alert(1)</script>"
LOOKS, TOKENS = 21, 5
TIMES = tuple(0.5 * k for k in range(LOOKS))


def band(values: tuple[float, ...]) -> Band:
    return Band(mean=values, low=tuple(0.9 * v for v in values), high=tuple(1.1 * v for v in values))


def run(scheme: str = "post", *, beta: float = 1.0, rate: float = 2.0, **changes: Any) -> SchemeRun:
    """Tokens that come down the sphere to its pole, and a variance that falls as e^{−rate t}."""
    fall = tuple(math.exp(-rate * time) for time in TIMES)
    rise = tuple(1 - value for value in fall)
    bands = {"cosine": rise, "variance": fall, "clusters": tuple(float(max(1, 5 - k // 3)) for k in range(LOOKS))}
    bands |= {"radius": (1.0,) * LOOKS, "fastest": fall}
    angles = [[(1 - k / (LOOKS - 1)) * (0.3 + 0.2 * token) for token in range(TOKENS)] for k in range(LOOKS)]
    fitted = Rate(form="exponential", value=-rate, low=-rate - 0.1, high=-rate + 0.1, begin=2.0, end=8.0, intercept=0.0)
    found: dict[str, Any] = {
        "times": TIMES,
        "bands": {name: band(values) for name, values in bands.items()},
        "histogram": tuple((0.25, 0.25, 0.25, 0.25) for _ in TIMES),
        "merges": (Merge(time=1.5, clusters=4), Merge(time=3.0, clusters=3)),
        "fits": (FittedLaw(observable="variance", rate=fitted, predicted=-2.0),),
        "tail": Tail(form="exponential", rate=-2.0, growth=0.0),
        "paths": tuple(tuple((math.sin(a), math.cos(a), 0.0) for a in look) for look in angles),
    }  # fmt: skip
    return SchemeRun(scheme=scheme, beta=beta, **found | changes)


def simulation(*runs: SchemeRun, **changes: Any) -> Simulation:
    config = {"tokens": TOKENS, "dim": 3, "seeds": 1, "time": 10.0, "clock": "plain", "method": "rk4"}
    found: dict[str, Any] = {
        "config": config | changes.pop("config", {}),
        "runs": runs or (run("post"), run("peri(step=0.1)", rate=0.5)),
        "explained": 1.0,
        "versions": {"normlab": "0.1.0", "torch": "2.13.0"},
        "command": ("normlab", "simulate", "--scheme", "post,peri(step=0.1)"),
    }
    return Simulation(**found | changes)


def result(**changes: Any) -> ExperimentResult:
    x = (1.0, 2.0, 3.0)
    figures = (
        Figure(
            title="Curves", x_label="time", y_label="value", y_log=True,
            curves=(
                make_curve("post", x, (1, 2, 4), low=(0.5, 1, 2), high=(2, 4, 8)),
                make_curve("post, fitted", x, (1, 2, 4), role="theory"),
                make_curve("peri", x, (1, 3, 9), marks=True), make_curve("a net", x, (2, 2, 2), role="model"),
            ),
        ),
        Figure(title="Image", x_label="time", y_label="β",
               curves=(make_curve("edge", (1.0, 2.0), (1.0, 2.0), role="theory"),),
               image=make_image(x, (1.0, 2.0), ((0, 0.5, 1), (0, 0, math.nan)), "share")),
    )  # fmt: skip
    verdicts = (
        judge_prediction("post", "rate", -2.00001, -2.0, 1e-3),
        judge_prediction("peri", "rate", -1.5, -2.0, 1e-3),
    )
    found: dict[str, Any] = {
        "experiment": "speed-laws", "about": "how fast", "config": {"scheme": ["post", "peri"], "seed": 0},
        "figures": figures, "columns": ("scheme", "rate"), "rows": (("post", -2.0), ("peri", math.nan)),
        "verdicts": verdicts,
        "notes": ("a note",), "command": ("normlab", "simulate", "speed-laws"), "versions": {"normlab": "0.1.0"},
    }  # fmt: skip
    return ExperimentResult(**found | changes)
