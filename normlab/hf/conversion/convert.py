"""Convert a Hugging Face model to another normalisation scheme: its layers are rewired, everything else is kept."""

from __future__ import annotations

import copy
import copy as copies
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from normlab.choices import Topology
from normlab.errors import NormLabError
from normlab.hf.conversion.converted_layer import Conversion, SchemeWiring, convert_layer, converted_layers
from normlab.hf.conversion.foreign_gate import ModelGate, recognise_gate
from normlab.hf.conversion.foreign_norm import ModelNorm, NormOptions
from normlab.hf.conversion.foreign_streams import FirstStream, load_weights_
from normlab.hf.conversion.identify import match_scheme, with_model_options
from normlab.hf.conversion.layer_structure import LayerStructure, model_norm, norm_options
from normlab.hf.conversion.model_structure import Adapter, ModelStructure, analyse_model
from normlab.hf.conversion.scheme_rules import Rules, rules
from normlab.hf.conversion.stream_step import StreamStep
from normlab.hf.conversion.trace import get_part
from normlab.norms import Norm
from normlab.probes.blocks import eager
from normlab.roles import Part, Spec
from normlab.schemes.catalog.registry import scheme as find_scheme
from normlab.schemes.contract.blocks import ParallelBlock
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.needs import meet_needs, offers
from normlab.schemes.contract.parts import Step
from normlab.schemes.contract.scheme import Scheme


class FunctionChanges(UserWarning):
    """Warning: a trained model was converted to another scheme, so it no longer computes the trained function."""


def convert(
    model: Any,
    scheme: str | Scheme,
    *,
    copy: bool = True,
    init: bool = False,
    topology: Topology | None = None,
    residual_only: bool = False,
    native: bool = False,
    roles: Mapping[str, Spec] | None = None,
    adapter: Adapter | None = None,
    batch: Mapping[str, Any] | None = None,
    blocks: str | None = None,
) -> Any:
    """Return the model under another scheme, as a copy or in place (`copy=False`).

    Weights are kept unless `init` is set. Attention, MLP, cache, mask and head are not changed. A norm of the model is
    kept where the scheme has the same kind of norm; others are new, of the model's kind unless the scheme's options
    name another. `residual_only` leaves out what the scheme changes inside the sublayers; `topology` rewires serial
    blocks as parallel ones or back. Of a model of several streams the modules are kept where the scheme computes the
    same; `native` copies their weights into the scheme's own modules instead, for its kernels. For `adapter`, `batch`
    and `blocks` see `identify`; for `roles` see `normlab.roles`.
    """
    # torch.compile's wrapper would be a part of all paths, those in the configuration included.
    inner = eager(model)
    if not hasattr(inner, "config"):
        raise NormLabError(f"{type(inner).__name__} is not a transformers model; for your own see normlab.Stack")
    if converted_layers(inner):
        raise NormLabError("the model is converted already; convert the original, or a new one from its configuration")
    found = analyse_model(inner, batch=batch, blocks=blocks, adapter=adapter)
    options = {"topology": topology, "residual_only": residual_only, "native": native, "roles": roles}
    conversion = plan_conversion(inner, found, scheme, **options)
    if init:
        # A matrix without a role raises, before anything is changed.
        Rules(inner, conversion, found.stack.names).find_roles()
    elif _changes(conversion.bound, found) and _is_trained(inner, found):
        name = conversion.bound.scheme.name
        text = f"{type(inner).__name__} has trained weights: under {name} it computes another function until trained"
        warnings.warn(text, FunctionChanges, stacklevel=2)
    converted = copies.deepcopy(model) if copy else model
    rewire_model(eager(converted), found, conversion)
    if init:
        rules(eager(converted)).init_()
    return converted


def plan_conversion(
    model: Any,
    found: ModelStructure,
    scheme: str | Scheme,
    *,
    topology: Topology | None = None,
    residual_only: bool = False,
    native: bool = False,
    roles: Mapping[str, Spec] | None = None,
) -> Conversion:
    """Check that the model can be converted and return the conversion; raises otherwise. Nothing is changed."""
    _check_norms(model, found)
    target = with_model_options(find_scheme(scheme), found)
    if not residual_only:
        _check_needs(target, model, found)
    depth, branches = len(found.layers), found.branches
    bound = target.bind(depth=depth, dim=found.dim, topology=topology or found.topology, branches=branches)
    if found.final_is_shared and not _keeps_final(model, bound, found):
        raise NormLabError(
            f"{type(model).__name__} uses {found.final!r} elsewhere, too, so its final norm cannot be changed alone; "
            "give the other place a norm of its own"
        )
    if found.streams is not None and found.head is None:
        raise NormLabError(
            f"{type(model).__name__} merges its streams by functions, which cannot be replaced; make that a module"
        )
    if native and (found.streams is None or not found.streams.reads_as(target)):
        raise NormLabError(f"native copies weights of streams, and {type(model).__name__} has none that {target} reads")
    return Conversion(bound, residual_only, dict(roles or {}), native)


def _keeps_final(model: Any, bound: BoundScheme, found: ModelStructure) -> bool:
    """Whether the scheme's exit is the norm that the model has in this place."""
    exit_ = bound.exit()
    return found.final is not None and isinstance(exit_, Norm) and model_norm(model, found.final).options.matches(exit_)


def _check_norms(model: Any, found: ModelStructure) -> None:
    """Raise if the model computes norms by functions, which cannot be replaced."""
    functions = [str(norm) for structure in found.layers for norm in structure.function_norms()]
    functions += [found.final_function] if found.final_function is not None else []
    if functions:
        raise NormLabError(
            f"{type(model).__name__} computes a norm by a function ({functions[0]}), which cannot be replaced; "
            "make it a module, or pass an adapter (docs/guides/converting.md)"
        )


def rewire_model(model: Any, found: ModelStructure, conversion: Conversion) -> None:
    """Rewire the layers of a model in place, and record the conversion in its configuration."""
    layers = [model.get_submodule(name) for name in found.stack.names]
    wirings = [
        _wiring(k, layer, structure, conversion)
        for k, (layer, structure) in enumerate(zip(layers, found.layers, strict=True))
    ]
    wirings[0].entry = _to_device_of(_entry(conversion, found), layers[0])
    _place_exit(model, found, wirings[-1], layers[-1])
    for layer, wiring in zip(layers, wirings, strict=True):
        convert_layer(layer, wiring)
    _keep_layers_whole(model, type(layers[0]).__name__)
    model.config.normlab = _record(found, conversion)


def _wiring(k: int, layer: nn.Module, structure: LayerStructure, conversion: Conversion) -> SchemeWiring:
    scheme = conversion.bound.scheme
    if not conversion.residual_only:
        meet_needs(scheme.needs, [part for part in layer.modules() if offers(part)], who=scheme.name)
    block = conversion.bound.block(k)
    usual = norm_options(layer, structure)
    for step, own in zip(block.steps, structure.norms(layer), strict=True):
        for place, norm in own.items():
            reuse_norm(step, place, norm, usual)
    for step, branch in zip(block.steps, structure.branches, strict=True):
        if branch.streams is not None:
            _read_streams(step, branch.streams, layer, conversion)  # type: ignore[arg-type]
        own_gate = branch.write_module(layer)
        if isinstance(own_gate, ModelGate) and recognise_gate(own_gate.gate) == recognise_gate(step.write):  # type: ignore[arg-type]
            step.write = own_gate
    if structure.shared_read and isinstance(block, ParallelBlock):
        block.share_read()
    return SchemeWiring(conversion, structure, _to_device_of(block, layer))


def _entry(conversion: Conversion, found: ModelStructure) -> nn.Module:
    """The scheme's entry. A model of several streams has made copies: they are the scheme's, or one of them is used."""
    entry = conversion.bound.entry()
    if found.streams is None:
        return entry
    if found.streams.reads_as(conversion.bound.scheme) and not conversion.native:
        return nn.Identity()
    return nn.Sequential(FirstStream(found.streams.scheme.streams, found.streams.flat), entry)


def _read_streams(step: Step, own: StreamStep, layer: nn.Module, conversion: Conversion) -> None:
    """Let a step read and write by the model's own modules or with their weights, if the scheme does the same."""
    if not own.read.reads_as(conversion.bound.scheme):
        return
    if conversion.native:
        load_weights_(step.read, get_part(layer, own.connection))
        return
    norms = (part for part in step.read.children() if isinstance(part, Norm | ModelNorm))
    kept = own.step(layer, None if own.read.normed else next(norms), step.write)
    step.read, step.write = kept.read, kept.write


def reuse_norm(parent: nn.Module, name: str, own: ModelNorm, usual: NormOptions | None) -> None:
    """Replace a new norm of the scheme by the model's own norm if both are of the same kind.

    A scheme has one epsilon and one form of gain. Where they are those of the model's first norm (`usual`), its other
    norms may differ in them. A scheme that has several norms in that place gets copies: they learn by themselves.
    """
    for i, (holder, place, made) in enumerate(_norms_in(parent, name)):
        if own.options.matches(made) or (usual is not None and own.options.serves(made, usual)):
            setattr(holder, place, copy.deepcopy(own) if i else own)


def _norms_in(parent: nn.Module, name: str) -> list[tuple[nn.Module, str, Norm]]:
    """The norms at and below a place, each with the module that holds it and its name there."""
    made = getattr(parent, name)
    if isinstance(made, Norm):
        return [(parent, name, made)]
    return [found for below, _ in made.named_children() for found in _norms_in(made, below)]


def _place_exit(model: nn.Module, found: ModelStructure, last: SchemeWiring, layer: nn.Module) -> None:
    """Put the scheme's exit in the place of the model's final norm, or in the last layer if it has none.

    A module that merges the model's streams is kept if the scheme merges alike; the exit is then the norm behind it.
    """
    bound = last.conversion.bound
    alike = _merges_alike(bound.scheme, found)
    keeps = alike and not last.conversion.native
    exit_ = nn.ModuleDict({"exit": bound.scheme.new_norm(bound.dim) if keeps else bound.exit()})
    if found.head is not None and not keeps:
        if alike:
            load_weights_(exit_, model.get_submodule(found.head))
        _replace(model, found.head, nn.Identity())
    if found.final is None and keeps:
        return
    if found.final is None:
        last.exit = _to_device_of(exit_["exit"], layer)
        return
    reuse_norm(exit_, "exit", model_norm(model, found.final), found.norm)
    _replace(model, found.final, _to_device_of(exit_["exit"], layer))


def _merges_alike(scheme: Scheme, found: ModelStructure) -> bool:
    """Whether the scheme reads and merges the streams as the model does."""
    read, merged = found.streams, found.merged
    if read is None or merged is None or not read.reads_as(scheme):
        return False
    return all(getattr(scheme, name) == getattr(merged, name) for name in merged.exit_options)


def _replace(model: nn.Module, path: str, part: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, part)


def _to_device_of(part: Any, layer: nn.Module) -> Any:
    """Move a new module to the layer's device; its gains stay in fp32."""
    for own in part.modules():
        if not any(True for _ in own.parameters(recurse=False)):
            # Models of the library initialise what is named like a norm when they are loaded, a gain or not.
            own._is_hf_initialized = True
    return part.to(next(layer.parameters()).device)


def _keep_layers_whole(model: nn.Module, name: str) -> None:
    """Add the class name of converted layers to `_no_split_modules`, for device maps and sharding."""
    for part in model.modules():
        kept = getattr(part, "_no_split_modules", None)
        if kept is not None:
            part._no_split_modules = {*kept, name}  # type: ignore[assignment]


def _record(found: ModelStructure, conversion: Conversion) -> dict[str, Any]:
    """Configuration entry from which `load` rebuilds the model."""
    bound = conversion.bound
    return {
        "scheme": bound.scheme.shared_text,
        "topology": bound.topology,
        "dim": bound.dim,
        "residual_only": conversion.residual_only,
        "roles": {name: spec if isinstance(spec, str) else _parts(spec) for name, spec in conversion.roles.items()},
        "blocks": found.pattern,
        "final": found.final,
        "head": found.head,
        "native": conversion.native,
    }


def _parts(spec: Part | Sequence[Part]) -> list[list[Any]]:
    return [list(part) for part in ([spec] if isinstance(spec, Part) else spec)]


def _check_needs(scheme: Scheme, model: Any, found: ModelStructure) -> None:
    """Raise if the scheme needs changes inside attention, MLP or head that the model does not support."""
    layer = found.stack.blocks[0]
    offered = frozenset[str]().union(*map(offers, layer.modules()))
    unmet = [need for need in scheme.needs if need.in_head or need.name not in offered]
    if unmet:
        whose = [type(layer).__name__] + ([type(model).__name__] if any(need.in_head for need in unmet) else [])
        tied = ": its head is tied to its embeddings" if _is_tied(model) and whose[1:] else ""
        raise NormLabError(
            f"{scheme.name} needs {'; '.join(map(str, unmet))}, which {' and '.join(whose)} cannot give{tied}; "
            "pass residual_only=True for the residual part alone"
        )


def _is_tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and getattr(model.get_input_embeddings(), "weight", None) is head.weight


def _changes(bound: BoundScheme, found: ModelStructure) -> bool:
    return bound.scheme != match_scheme(found) or bound.topology != found.topology


def _is_trained(model: Any, found: ModelStructure) -> bool:
    """Whether the model is trained: its norm gains differ from their initial values, or it was loaded by name."""
    norms = [norm for norm in _norms(model, found) if norm.options.gain != "none"]
    return not all(norm.is_fresh for norm in norms) if norms else bool(getattr(model.config, "name_or_path", ""))


def _norms(model: nn.Module, found: ModelStructure) -> Iterator[ModelNorm]:
    for layer, structure in zip(found.stack.blocks, found.layers, strict=True):
        for own in structure.norms(layer):
            yield from own.values()
    if found.final is not None:
        yield model_norm(model, found.final)
