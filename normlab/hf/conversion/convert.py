"""Any model of the library's under any scheme: its layers rewired, everything else as it was."""

from __future__ import annotations

import copy as copies
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from normlab.choices import Topology
from normlab.errors import NormLabError
from normlab.hf.conversion.anatomy import Anatomy, model_norm
from normlab.hf.conversion.converted_layer import Conversion, Wiring, adopt, converted_layers
from normlab.hf.conversion.foreign_norm import ModelNorm
from normlab.hf.conversion.identify import as_in_model, scheme_of
from normlab.hf.conversion.scheme_rules import Rules, rules
from normlab.hf.conversion.survey import Adapter, Survey, survey
from normlab.norms import Norm
from normlab.roles import Part, Spec
from normlab.schemes.catalog.registry import scheme as find_scheme
from normlab.schemes.contract.blocks import ParallelBlock
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.needs import meet_needs, offers
from normlab.schemes.contract.scheme import Scheme


class FunctionChanges(UserWarning):
    """A trained model was converted to another scheme: it does not compute what it was trained for."""


def convert(
    model: Any,
    scheme: str | Scheme,
    *,
    copy: bool = True,
    init: bool = False,
    topology: Topology | None = None,
    residual_only: bool = False,
    roles: Mapping[str, Spec] | None = None,
    adapter: Adapter | None = None,
    batch: Mapping[str, Any] | None = None,
    blocks: str | None = None,
) -> Any:
    """The model under a scheme, as a copy or in place (`copy=False`), with its own weights unless `init` is set.

    Attention, MLP, cache, mask and head stay the model's own. A norm of the model's stays where the scheme wants one
    like it; others are made new, of the model's kind unless the scheme's options name another. `residual_only` leaves
    out what the scheme needs inside the sublayers; `topology` rewires serial blocks as parallel ones or back. For
    `adapter`, `batch` and `blocks` see `identify`; for `roles` see `normlab.roles`.
    """
    if not hasattr(model, "config"):
        raise NormLabError(f"{type(model).__name__} is no model of transformers; for your own see normlab.Stack")
    if converted_layers(model):
        raise NormLabError("the model is converted already; convert the original, or a new one from its configuration")
    found = survey(model, batch=batch, blocks=blocks, adapter=adapter)
    conversion = plan(model, found, scheme, topology=topology, residual_only=residual_only, roles=roles)
    if init:
        # Before anything is changed: a matrix without a role raises.
        Rules(model, conversion, found.stack.names).find_roles()
    elif _changes(conversion.bound, found) and _is_trained(model, found):
        name = conversion.bound.scheme.name
        text = f"{type(model).__name__} has trained weights: under {name} it computes another function until trained"
        warnings.warn(text, FunctionChanges, stacklevel=2)
    converted = copies.deepcopy(model) if copy else model
    rewire(converted, found, conversion)
    if init:
        rules(converted).init_()
    return converted


def plan(
    model: Any,
    found: Survey,
    scheme: str | Scheme,
    *,
    topology: Topology | None = None,
    residual_only: bool = False,
    roles: Mapping[str, Spec] | None = None,
) -> Conversion:
    """What the model would be converted to; what cannot be raises with the reason, and nothing is changed."""
    _check_norms(model, found)
    target = as_in_model(find_scheme(scheme), found)
    if not residual_only:
        _check_needs(target, model, found)
    depth, branches = len(found.anatomies), found.branches
    bound = target.bind(depth=depth, dim=found.dim, topology=topology or found.topology, branches=branches)
    if found.final_is_shared and _changes(bound, found):
        raise NormLabError(
            f"{type(model).__name__} uses {found.final!r} elsewhere, too, so its final norm cannot be changed alone; "
            "give the other place a norm of its own"
        )
    return Conversion(bound, residual_only, dict(roles or {}))


def _check_norms(model: Any, found: Survey) -> None:
    """Refuse norms that are no modules: there is nothing to take out of the model."""
    functions = [str(norm) for anatomy in found.anatomies for norm in anatomy.functions()]
    functions += [found.final_function] if found.final_function is not None else []
    if functions:
        raise NormLabError(
            f"{type(model).__name__} computes a norm by a function ({functions[0]}), which cannot be replaced; "
            "make it a module, or pass an adapter (docs/guides/converting.md)"
        )


def rewire(model: Any, found: Survey, conversion: Conversion) -> None:
    """Give the layers of a model their new steps, in place, and let its configuration say so."""
    layers = [model.get_submodule(name) for name in found.stack.names]
    wirings = [
        _wiring(k, layer, anatomy, conversion)
        for k, (layer, anatomy) in enumerate(zip(layers, found.anatomies, strict=True))
    ]
    wirings[0].entry = _beside(conversion.bound.entry(), layers[0])
    _place_exit(model, found, wirings[-1], layers[-1])
    for layer, wiring in zip(layers, wirings, strict=True):
        adopt(layer, wiring)
    _tell(model, type(layers[0]).__name__)
    model.config.normlab = _record(found, conversion)


def _wiring(k: int, layer: nn.Module, anatomy: Anatomy, conversion: Conversion) -> Wiring:
    scheme = conversion.bound.scheme
    if not conversion.residual_only:
        meet_needs(scheme.needs, [part for part in layer.modules() if offers(part)], who=scheme.name)
    block = conversion.bound.block(k)
    for step, own in zip(block.steps, anatomy.norms(layer), strict=True):
        for place, norm in own.items():
            use_own(step, place, norm)
    if anatomy.shared_read and isinstance(block, ParallelBlock):
        block.share_read()
    return Wiring(conversion, anatomy, _beside(block, layer))


def use_own(parent: nn.Module, name: str, own: ModelNorm) -> None:
    """Put a norm of the model's in the place of the one that the scheme made there, if that is of its kind."""
    made = getattr(parent, name)
    if isinstance(made, Norm):
        if own.options.matches(made):
            setattr(parent, name, own)
        return
    for below, _ in made.named_children():
        use_own(made, below, own)


def _place_exit(model: nn.Module, found: Survey, last: Wiring, layer: nn.Module) -> None:
    """The scheme's exit where the model has its final norm; in the last layer where it has none."""
    exit_ = nn.ModuleDict({"exit": last.conversion.bound.exit()})
    if found.final is None:
        last.exit = _beside(exit_["exit"], layer)
        return
    use_own(exit_, "exit", model_norm(model, found.final))
    owner, _, name = found.final.rpartition(".")
    setattr(model.get_submodule(owner), name, _beside(exit_["exit"], layer))


def _beside(part: Any, layer: nn.Module) -> Any:
    """A new part on the layer's device; its gains stay in fp32 whatever the layer's type."""
    return part.to(next(layer.parameters()).device)


def _tell(model: nn.Module, name: str) -> None:
    """Whoever keeps layers whole (device maps, sharding) knows them by the names of their classes."""
    for part in model.modules():
        kept = getattr(part, "_no_split_modules", None)
        if kept is not None:
            part._no_split_modules = {*kept, name}  # type: ignore[assignment]


def _record(found: Survey, conversion: Conversion) -> dict[str, Any]:
    """What `load` needs to build the model again."""
    bound = conversion.bound
    return {
        "scheme": bound.scheme.shared_text,
        "topology": bound.topology,
        "dim": bound.dim,
        "residual_only": conversion.residual_only,
        "roles": {name: spec if isinstance(spec, str) else _parts(spec) for name, spec in conversion.roles.items()},
        "blocks": found.pattern,
        "final": found.final,
    }


def _parts(spec: Part | Sequence[Part]) -> list[list[Any]]:
    return [list(part) for part in ([spec] if isinstance(spec, Part) else spec)]


def _check_needs(scheme: Scheme, model: Any, found: Survey) -> None:
    """Refuse a scheme that must change what is inside other people's attention, MLP or head."""
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


def _changes(bound: BoundScheme, found: Survey) -> bool:
    return bound.scheme != scheme_of(found) or bound.topology != found.topology


def _is_trained(model: Any, found: Survey) -> bool:
    """Training moves the norms' gains; where they have none, weights from a file have a name."""
    norms = [norm for norm in _norms(model, found) if norm.options.gain != "none"]
    return not all(norm.is_fresh for norm in norms) if norms else bool(getattr(model.config, "name_or_path", ""))


def _norms(model: nn.Module, found: Survey) -> Iterator[ModelNorm]:
    for layer, anatomy in zip(found.stack.blocks, found.anatomies, strict=True):
        for own in anatomy.norms(layer):
            yield from own.values()
    if found.final is not None:
        yield model_norm(model, found.final)
