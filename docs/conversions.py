"""The matrix of conversions: published architectures, as their default configurations make them, against every scheme.

The models are laid out without weights and two blocks deep; what `normlab.hf.convert` would refuse is refused here.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

import normlab
from normlab.errors import NormLabError
from normlab.hf.conversion.convert import plan_conversion
from normlab.hf.conversion.identify import match_scheme
from normlab.hf.conversion.model_structure import ModelStructure, analyse_model
from normlab.targets import hub
from normlab.targets.config_sizes import with_depth
from normlab.targets.hugging_face import purpose_of

BEGIN, END = "<!-- matrix: begin (make docs) -->", "<!-- matrix: end -->"

ARCHITECTURES = {
    "Llama": "Llama", "Qwen 2": "Qwen2", "Qwen 3": "Qwen3", "Mistral": "Mistral", "Mixtral": "Mixtral", "GPT-2": "GPT2",
    "OPT": "OPT", "GPT-NeoX": "GPTNeoX", "GPT-J": "GPTJ", "Phi": "Phi", "Falcon": "Falcon", "Cohere": "Cohere",
    "Gemma 2": "Gemma2", "Gemma 3": "Gemma3Text", "Gemma 4": "Gemma4Text", "NanoChat": "NanoChat",
    "Muse Spark": "MuseSparkText", "DeepSeek-V4": "DeepseekV4", "HY-V4": "HYV4", "OLMo 2": "Olmo2", "BERT": "Bert",
    "DistilBERT": "DistilBert", "ViT": "ViT",
}  # fmt: skip

WAYS: dict[str, dict[str, Any]] = {
    "✓": {},
    "r": {"residual_only": True},
    "s": {"topology": "serial"},
    "rs": {"residual_only": True, "topology": "serial"},
}
"""What to pass so that a scheme can be had, the least first."""


def table() -> str:
    """One row per architecture, one column per scheme."""
    names = normlab.list_schemes()
    lines = ["| | has | " + " | ".join(f"`{name}`" for name in names) + " |", "|---" * (len(names) + 2) + "|"]
    for title, stem in ARCHITECTURES.items():
        model, found = laid_out(stem)
        own = match_scheme(found)
        has = f"`{own.name if own else '?'}`{', parallel' if found.topology == 'parallel' else ''}"
        lines.append(f"| {title} | {has} | " + " | ".join(cell(model, found, name) for name in names) + " |")
    return "\n".join(lines)


def laid_out(stem: str) -> tuple[Any, ModelStructure]:
    """A model of an architecture, and what it is made of."""
    config = getattr(transformers, f"{stem}Config")()
    shallow = with_depth(config, 2, config.num_hidden_layers)
    with torch.device("meta"), hub.quiet():
        # In bf16: the library's experts have no other product on a device without values.
        made = getattr(transformers, purpose_of(config, stem).makes).from_config(shallow, dtype=torch.bfloat16)
        return made, analyse_model(made)


def cell(model: Any, found: ModelStructure, scheme: str) -> str:
    """How a scheme can be had."""
    for mark, options in WAYS.items():
        try:
            plan_conversion(model, found, scheme, **options)
        except NormLabError:
            continue
        return mark
    return "–"
