"""The command `normlab check`. Importing this does not import torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import tyro

from normlab.checks.config import CheckConfig
from normlab.errors import NormLabError


def check(
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")],
    /,
    config: CheckConfig,
    against: str | None = None,
    json: Path | None = None,
    html: Path | None = None,
) -> None:
    """Check whether activations or gradients of a deep model explode, vanish or collapse, in which layers, and why.

    For example:
      normlab check "peri(step=0.1)" --against post
      normlab check path/to/config.json --shrink 16 --html page.html
      normlab check package.module:factory --depths 12,24,48 --fail-on exploding,unsteady
      normlab check pre --coordinates --base-dim 64 --base-depth 4

    Exit code: 1 if a verdict named by --fail-on is found, 2 if the target cannot be checked. With --coordinates: 1 if
    activations depend on width or depth against a derived transfer rule.

    Args:
        target: A scheme with options, one in a file (highway.py:Highway), a Hugging Face id, a config.json,
            module:factory (a function of depth and width that returns a model), or the folder of a run.
        config: Configuration of the check.
        against: A second target, checked in the same way and shown next to the first.
        json: Write the full result to this JSON file.
        html: Write a page with plots to this HTML file.
    """
    from normlab.checks.check import check as run
    from normlab.checks.check import prepare, share_reference
    from normlab.checks.view import card
    from normlab.checks.view import side_by_side as pair
    from normlab.utils.files import writable

    if config.coordinates:
        _coordinates(target, config, against, json, html)
    kept = [writable(path, suffix) for path, suffix in ((json, ".json"), (html, ".html")) if path is not None]
    targets = [prepare(name, config) for name in (target, against) if name is not None]
    results = [run(one, config=config, progress=True, command=["normlab", *sys.argv[1:]]) for one in targets]
    shown = results[0] if against is None else pair.Against(*share_reference(*results))
    card.show(shown)
    for path in kept:
        print(f"{path.suffix[1:]}: {shown.save(path)}")
    sys.exit(1 if shown.failed(config.fail_on) else 0)


def _coordinates(target: str, config: CheckConfig, against: str | None, *files: Path | None) -> NoReturn:
    from normlab.checks.coordinates import axes, card
    from normlab.utils.files import writable

    if against is not None:
        raise NormLabError("--coordinates checks one design; leave out --against, and run it again for the other")
    kept = [writable(path, suffix) for path, suffix in zip(files, (".json", ".html"), strict=True) if path is not None]
    result = axes.check_coordinates(target, config=config, progress=True, command=["normlab", *sys.argv[1:]])
    card.show(result)
    for path in kept:
        print(f"{path.suffix[1:]}: {result.save(path)}")
    sys.exit(1 if result.failed else 0)
