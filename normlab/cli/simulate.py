"""The verb `normlab simulate`. Importing it imports neither torch nor numpy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments import EXPERIMENTS


def simulate(
    experiment: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="EXPERIMENT")] = None,
    /,
    config: SimulateConfig = SimulateConfig(),  # noqa: B008  # frozen
    json: Path | None = None,
    html: Path | None = None,
) -> None:
    """Follow tokens through depth as particles on a sphere, and hold what they do against theory.

    For instance:
      normlab simulate --scheme post,pre,peri --html page.html
      normlab simulate --scheme peri --tokens 256 --dim 512 --beta 5
      normlab simulate speed-laws
      normlab simulate real-model --model runs/peri-1 --html page.html

    Experiments have defaults of their own, which flags change:
      {experiments}

    Args:
        experiment: One of those above; without it a free run.
        config: The simulation.
        json: Keep everything in this file.
        html: Write a page with the moving tokens and the curves into this file.
    """
    from normlab.dynamics import dispatch
    from normlab.dynamics.view import card

    kept = [dispatch.writable(path, suffix) for path, suffix in ((json, ".json"), (html, ".html")) if path is not None]
    result = dispatch.run(experiment, config, command=["normlab", *sys.argv[1:]])
    card.show(result)
    for path in kept:
        print(f"{path.suffix[1:]}: {result.save(path)}")


# A docstring cannot be an f-string.
simulate.__doc__ = (simulate.__doc__ or "").replace(
    "{experiments}", "\n      ".join(f"{one.name:<16} {one.about}" for one in EXPERIMENTS.values())
)
