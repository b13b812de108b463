"""`resolve`: from what a user names (scheme, Hugging Face id, path, factory, module, run) to a `Target`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from normlab.errors import NormLabError, unknown
from normlab.schemes.catalog import reference, registry
from normlab.schemes.contract.scheme import Scheme
from normlab.targets.data import token_data
from normlab.targets.factory import FactoryTarget, import_factory
from normlab.targets.hugging_face import HuggingFaceTarget
from normlab.targets.module import ModuleTarget
from normlab.targets.run import RunTarget
from normlab.targets.scheme import SchemeTarget
from normlab.targets.target import Target
from normlab.utils.files import read_json

_EXPECTED = "a scheme, file.py:Scheme, a Hugging Face id, a config.json, a run folder or module:factory"


def resolve(
    target: str | Path | nn.Module | Scheme | Callable[..., Any],
    *,
    batch: Any = None,
    loss_fn: Any = None,
    data: str = "bigram",
    length: int = 48,
    batch_size: int = 8,
    width: int | None = None,
    depth: int | None = None,
    vocabulary: int = 64,
    shrink: int | None = None,
    weights: bool = False,
    blocks: str | None = None,
    device: str = "cpu",
    dtype: str = "fp32",
) -> Target:
    """Make a `Target` of anything that can be checked.

    target      a scheme (`"peri(step=0.1)"`), a Hugging Face id, configuration, config.json or folder, a run folder,
                `"module:factory"`, a factory of depth and width, or a live module
    batch       input of a module or of a factory's module, with loss_fn(model, batch); guessed if left out
    data        random or bigram tokens from a vocabulary of `vocabulary`, or a text file; each batch has `batch_size`
                sequences of `length` tokens
    depth       number of blocks, if not the design's own; `width` likewise
    shrink      divide the width of a Hugging Face model by this factor
    weights     use the trained weights of a Hugging Face model or a run instead of random ones
    blocks      pattern of the block modules, e.g. `model.layers.*`, if they are not found automatically
    dtype       floating-point type of matrix products; parameters stay in fp32
    """
    _check_sizes(length=length, batch_size=batch_size, width=width, depth=depth, shrink=shrink)
    sizes: dict[str, Any] = {"length": length, "batch_size": batch_size}
    tokens: dict[str, Any] = {"data": data, "vocabulary": vocabulary, **sizes}
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    kind, found = _identify(target)
    _check_options(kind, batch=batch, loss_fn=loss_fn, shrink=shrink, weights=weights, blocks=blocks)
    size: dict[str, Any] = {"depth": depth, "width": width}
    brought: dict[str, Any] = {"batch": batch, "loss_fn": loss_fn, "blocks": blocks}
    match kind:
        case "scheme":
            named = SchemeTarget(found, token_data(data, vocabulary=vocabulary), **size, **sizes, **place)
            named.notes = _alias_note(target, found)
            return named
        case "run":
            return RunTarget(found, weights=weights, **tokens, **size, **place)
        case "hugging face":
            return HuggingFaceTarget(found, shrink=shrink, weights=weights, blocks=blocks, **tokens, **size, **place)
        case "module":
            return ModuleTarget(found, dtype=dtype, **brought, **tokens)
        case _:
            name = target if isinstance(target, str) else None
            return FactoryTarget(found, name=name, **brought, **tokens, **size, **place)


def _identify(target: Any) -> tuple[str, Any]:
    """(kind of target, the object to make it from)."""
    if isinstance(target, str | Path):
        return _identify_text(target)
    if isinstance(target, Scheme):
        return "scheme", target
    if isinstance(target, nn.Module):
        return "module", target
    if hasattr(target, "model_type") and hasattr(target, "to_dict"):
        return "hugging face", target
    if callable(target):
        return "factory", target
    raise NormLabError(f"cannot check a {type(target).__name__}; expected {_EXPECTED}, or a module in Python")


def _identify_text(target: str | Path) -> tuple[str, Any]:
    path, text = Path(target).expanduser(), str(target)
    if not text.strip():
        raise NormLabError(f"no target was named; expected {_EXPECTED}")
    if named := reference.read(text):
        return _identify_object(named, text)
    if path.exists() and not _is_scheme(text):
        if _is_run(path):
            return "run", path if path.is_dir() else path.parent
        return "hugging face", path
    if isinstance(target, Path) or text.startswith((".", "/", "~")) or path.suffix == ".json":
        raise NormLabError(f"{text} does not exist; check the path, or name {_EXPECTED}")
    if _is_scheme(text):
        return "scheme", registry.scheme(text)
    if ":" in text:
        return "factory", import_factory(text)
    if "(" in text or difflib.get_close_matches(text.lower(), registry.list_schemes(), n=1, cutoff=0.6):
        # Nearer to a scheme than to the name of a model: no use asking the hub. A known one says what is wrong with it.
        if text.partition("(")[0].strip().lower() in registry.list_schemes():
            registry.parse(text)
        raise unknown("target", text.partition("(")[0], registry.list_schemes())
    return "hugging face", text


def _identify_object(named: reference.Reference, text: str) -> tuple[str, Any]:
    """A class of schemes or a factory, in a file or in a module."""
    found = reference.load(named) if named.is_file else import_factory(str(named))
    if reference.is_scheme(found):
        return "scheme", registry.scheme(text)
    if named.options or not callable(found):
        raise NormLabError(f"{named} is not a scheme; expected a class derived from normlab.Scheme, or a factory alone")
    return "factory", found


def _is_scheme(text: str) -> bool:
    try:
        registry.find_class(registry.parse(text)[0])
    except NormLabError:
        return False
    return True


def _alias_note(target: Any, scheme: Scheme) -> tuple[str, ...]:
    """Some models are known by the name of a scheme's alias, and the other way round."""
    typed = registry.parse(target)[0] if isinstance(target, str) else scheme.name
    if typed in registry.list_schemes() or scheme.origin() is not None:
        return ()
    return (f"{typed} is taken as the scheme {scheme.name}; a Hugging Face model has its owner before its name",)


def _is_run(path: Path) -> bool:
    """A run's config.json holds the configuration of a run; a model's names its type."""
    file = path / "config.json" if path.is_dir() else path
    if path.is_file() and file.suffix != ".json":
        raise NormLabError(f"{path} is not a target; expected {_EXPECTED}")
    if not file.is_file():
        raise NormLabError(f"{path} has no config.json; expected the folder of a run or of a Hugging Face model")
    values = read_json(file)
    return isinstance(values, dict) and "config" in values and "model_type" not in values


def _check_options(kind: str, *, batch: Any, loss_fn: Any, shrink: int | None, weights: bool, blocks: Any) -> None:
    """Raise for an option that has no meaning for this kind of target."""
    if kind in ("scheme", "run", "hugging face") and (batch is not None or loss_fn is not None):
        raise NormLabError(f"batch and loss_fn are for modules and factories, not for a {kind} target; leave them out")
    if shrink and kind != "hugging face":
        raise NormLabError(f"shrink is for Hugging Face models, not for a {kind} target; set width instead")
    if weights and kind not in ("hugging face", "run"):
        raise NormLabError(f"weights are for Hugging Face models and runs, not for a {kind} target; leave them out")
    if blocks is not None and kind in ("scheme", "run"):
        raise NormLabError(f"blocks are found in a {kind} target; leave the pattern out")


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise NormLabError(f"{name} must be at least 1, got {size}")
