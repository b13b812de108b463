"""Load a converted model from a folder written by `save_pretrained`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError, in_one_line
from normlab.hf.conversion.convert import rewire_model
from normlab.hf.conversion.converted_layer import Conversion
from normlab.hf.conversion.layer_structure import norm_options
from normlab.hf.conversion.model_structure import Adapter, ModelStructure, analyse_layers, find_one_stack, merged_by
from normlab.roles import Part, Spec
from normlab.schemes.catalog.reference import refuse_unknown
from normlab.schemes.catalog.registry import scheme as find_scheme
from normlab.targets import hub


def load(folder: str | Path, *, adapter: Adapter | None = None, **options: Any) -> Any:
    """Load the converted model in a folder; `options` are passed to `from_pretrained` (dtype, device_map, ...)."""
    config, name = hub.load_config(str(folder), converted=True)
    spec = getattr(config, "normlab", None)
    made = getattr(config, "architectures", None) or [""]
    base: Any = getattr(hub.library(), made[0], None)
    if not isinstance(spec, dict) or base is None:
        raise NormLabError(f"{name} holds no converted model; load it with transformers' from_pretrained")

    refuse_unknown(str(spec.get("scheme", "")))

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        _rewire(self, spec, adapter)

    with in_one_line(
        f"{name}: the converted model cannot be loaded", "expected a folder of save_pretrained, unchanged"
    ):
        # transformers builds the model and then loads the weights: the layers must be rewired in between. It renames
        # weights for classes of its own modules alone.
        made_by = {"__init__": build, "__module__": base.__module__}
        model, report = type(base.__name__, (base,), made_by).from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
        )
    hub.refuse_missing(name, report["missing_keys"], report["unexpected_keys"])
    model.__class__ = base
    return model


def _rewire(model: Any, spec: dict[str, Any], adapter: Adapter | None) -> None:
    stack = find_one_stack(model, spec["blocks"])
    structures = analyse_layers(stack, adapter)
    norm = norm_options(stack.blocks[0], structures[0])
    found = ModelStructure(stack, structures, spec["final"], spec["dim"], norm)
    if found.streams is not None:
        head = spec.get("head")
        found = replace(found, head=head, merged=merged_by(model, head, found.streams, found.dim))
    bound = find_scheme(spec["scheme"]).bind(
        depth=len(structures), dim=found.dim, topology=spec["topology"], branches=found.branches
    )
    rewire_model(
        model, found, Conversion(bound, spec["residual_only"], _roles(spec["roles"]), spec.get("native", False))
    )


def _roles(plain: dict[str, Any]) -> dict[str, Spec]:
    return {name: spec if isinstance(spec, str) else [Part(*part) for part in spec] for name, spec in plain.items()}
