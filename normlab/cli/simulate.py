"""The command `normlab simulate`. Importing this does not import torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments import EXPERIMENTS


def simulate(
    experiment: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[EXPERIMENT]")] = None,
    /,
    config: SimulateConfig = SimulateConfig(),  # noqa: B008  # frozen
    json: Path | None = None,
    html: Path | None = None,
) -> None:
    """Simulate tokens through depth as interacting particles on a sphere, and compare the result with theory.

    For example:
      normlab simulate --scheme post,pre,peri --html page.html
      normlab simulate --scheme peri --tokens 256 --dim 512 --beta 5
      normlab simulate speed-laws
      normlab simulate real-model --model runs/peri-1 --html page.html

    Experiments have their own defaults; flags override them:
      {experiments}

    Args:
        experiment: An experiment from the list above; none: a free simulation.
        config: Configuration of the simulation.
        json: Write the full result to this JSON file.
        html: Write a page with animated tokens and plots to this HTML file.
    """
    from normlab.dynamics.command import run_command
    from normlab.dynamics.view import card
    from normlab.utils.files import writable

    kept = [writable(path, suffix) for path, suffix in ((json, ".json"), (html, ".html")) if path is not None]
    result = run_command(experiment, config, command=["normlab", *sys.argv[1:]])
    card.print_result(result)
    for path in kept:
        print(f"{path.suffix[1:]}: {result.save(path)}")


# A docstring cannot be an f-string.
simulate.__doc__ = (simulate.__doc__ or "").replace(
    "{experiments}", "\n      ".join(f"{one.name:<16} {one.about}" for one in EXPERIMENTS.values())
)
