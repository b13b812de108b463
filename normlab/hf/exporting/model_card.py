"""Model card (README.md) of an exported run: scheme, training data, losses, how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from normlab.models.config import DecoderConfig
from normlab.pages.markdown import escape, table
from normlab.pages.numbers import fixed, format_count, rate
from normlab.pages.tables import Cell, Column, Table
from normlab.schemes.catalog.card import Card
from normlab.schemes.contract.scheme import Scheme
from normlab.train.run import Run
from normlab.train.tasks import LanguageTrainConfig
from normlab.utils.files import read_json
from normlab.utils.text import counted

_LOADING = """```python
import normlab.hf  # makes the model known to transformers; pip install "normlab[hf]"
{scheme}from transformers import pipeline

print(pipeline("text-generation", "path/to/this/folder")("The ", max_new_tokens=50))
```"""


def model_card(run: Run, model: DecoderConfig) -> str:
    """The README.md of the export, in Markdown with the metadata of the Hugging Face Hub."""
    scheme = model.scheme_object
    about = Card.of(scheme)
    metadata = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["normlab", scheme.name]}
    # JSON is valid YAML: names with colons or quotes stay strings.
    header = "\n".join(f"{name}: {json.dumps(value)}" for name, value in metadata.items())
    parts = [
        f"---\n{header}\n---",
        f"# {escape(about.title)} decoder, {format_count(model.num_params())} parameters",
        f"{escape(about.title)}: {escape(about.summary)} Trained and exported by NormLab.",
        table(_as_table(_facts(run, model))),
        "## Use",
        _LOADING.replace("{scheme}", _own_file(scheme)),
    ]
    return "\n\n".join(parts) + "\n"


def _own_file(scheme: Scheme) -> str:
    """Line that imports the scheme before the model is loaded, if it is not one of NormLab's."""
    origin = scheme.origin()
    if origin is None:
        return ""
    where = f"path/to/{origin.shared.where}" if origin.where.endswith(".py") else origin.where
    return f"normlab.scheme({f'{where}:{origin.cls}'!r})  # the scheme, which this folder does not hold\n"


def _facts(run: Run, model: DecoderConfig) -> dict[str, str]:
    # Only runs of this task are exported.
    config = cast(LanguageTrainConfig, run.config)
    result = run.status.get("result") or {}
    made_with = read_json(run.folder.path / "config.json").get("versions", {})
    blocks, heads = counted(model.depth, "block"), counted(model.heads, "head")
    return {
        "Scheme": model.scheme_object.label,
        "Size": f"{blocks}, width {model.dim}, {heads}, vocabulary {model.vocab_size}",
        "Length": f"{model.max_length} tokens at most, trained on {config.length}",
        "Data": ", ".join(config.data),
        "Tokenizer": config.tokenizer,
        "Tokens": format_count(result.get("tokens")),
        "Learning rate": f"{rate(config.lr)}, {config.optimiser}, {config.schedule}",
        "Seed": str(config.seed),
        "Validation loss (nats a token)": fixed(result.get("loss")),
        "Bits per byte": fixed(result.get("bits_per_byte")),
        "Device": str(result.get("device", "unknown")),
        "Versions": ", ".join(f"{name} {version}" for name, version in made_with.items()),
    }


def _as_table(facts: Mapping[str, str]) -> Table:
    rows = [[Cell(name), Cell(value)] for name, value in facts.items()]
    return Table("Run", [Column("What"), Column("Value")], rows, sortable=False)
