"""Optional dependencies: what each extra of the package enables, and which of its packages are missing."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

ENABLES = {
    "bpe": "BPE tokenizers: train --tokenizer bpe:32768",
    "cluster": "runs on many machines: compare --on ray",
    "eval": "tasks of lm-evaluation-harness: eval --tasks",
    "hf": "Hugging Face: hf: data sets, published configurations, export, convert, Trainer",
    "parquet": "Parquet files as training text",
    "plots": "static figures: bench --plot",
    "tensorboard": "metrics in TensorBoard",
    "trackio": "metrics in Trackio",
    "vision": "images: train --task images",
    "wandb": "metrics in Weights & Biases",
    "zstd": "text compressed with Zstandard",
}
"""Extra → what it is for. Extras for work on NormLab itself are not listed."""

_REQUIREMENT = re.compile(r"""([\w.-]+)[^;]*;.*extra\s*==\s*['"]([\w.-]+)['"]""")


@dataclass(frozen=True, kw_only=True)
class Extra:
    """One extra: `pip install "normlab[NAME]"`."""

    name: str
    enables: str
    missing: tuple[str, ...]
    """Packages that are not installed."""

    @property
    def installed(self) -> bool:
        return not self.missing

    @property
    def line(self) -> str:
        """What it is for, and how to get it where it is missing."""
        if self.installed:
            return f"installed: {self.enables}"
        return f'not installed ({", ".join(self.missing)}): {self.enables}; pip install "normlab[{self.name}]"'


def extras() -> list[Extra]:
    """Every extra, by name; none if NormLab runs from a folder that was not installed."""
    packages = _packages()
    found = [(name, enables, packages[name]) for name, enables in ENABLES.items() if name in packages]
    return [
        Extra(name=name, enables=enables, missing=tuple(package for package in needed if version(package) is None))
        for name, enables, needed in found
    ]


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> dict[str, list[str]]:
    """Extra → the packages that it needs, as this installation records them."""
    try:
        lines = importlib.metadata.requires("normlab") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for line in lines:
        if match := _REQUIREMENT.match(line):
            found.setdefault(match[2], []).append(match[1])
    return found
