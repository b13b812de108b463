"""Load configurations, weights and tokenizers with transformers, from disk or from the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normlab.errors import NormLabError, in_one_line
from normlab.utils.files import read_json
from normlab.utils.hub import is_reachable
from normlab.utils.lazy import import_optional
from normlab.utils.text import counted

_ADVICE = "check the name and the network, or download its config.json and name that file"


def library() -> Any:
    """The transformers package."""
    return import_optional("transformers", "hf", "a Hugging Face model")


def load_config(source: Any, *, converted: bool = False) -> tuple[Any, str]:
    """(configuration, name for titles) of a Hugging Face id, folder, file or configuration object.

    That of a model that `normlab.hf.convert` has rewired is refused unless `converted` is set: transformers would build
    the original architecture.
    """
    config, name = _load_config(source)
    spec = getattr(config, "normlab", None)
    if isinstance(spec, dict) and not converted:
        raise NormLabError(
            f"{name} is the configuration of a model converted to {spec.get('scheme')}, which transformers does not "
            "build; load it with normlab.hf.load(folder) and pass the model itself"
        )
    return config, name


def _load_config(source: Any) -> tuple[Any, str]:
    if not isinstance(source, str | Path):
        return source, getattr(source, "name_or_path", "") or source.model_type
    path = Path(source)
    if path.exists():
        return _from_file(path / "config.json" if path.is_dir() else path), str(source)
    return _from_hub(str(source)), str(source)


def weights_folder(source: Any) -> str:
    """Where to load weights from: an id, or the folder of a configuration."""
    if not isinstance(source, str | Path):
        raise NormLabError("a configuration has no weights; name the folder or the id that has")
    path = Path(source)
    return str(path.parent if path.is_file() else source)


def load_weights(folder: str, auto: str, config: Any, *, needed: str = "") -> nn.Module:
    """Load a published model with its weights; raises if one that matches the pattern `needed` is missing."""
    with (
        quiet(),
        in_one_line(f"{folder}: its weights cannot be loaded", "expected *.safetensors files beside config.json"),
    ):
        model, report = getattr(library(), auto).from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
            local_files_only=Path(folder).exists() or not is_reachable(), output_loading_info=True,
        )  # fmt: skip
    refuse_missing(folder, [name for name in report["missing_keys"] if re.match(needed, name)])
    return model


def refuse_missing(folder: str, missing: Collection[str], unknown: Collection[str] = ()) -> None:
    """Raise for missing and for unexpected weights.

    transformers only warns of both. It draws what is missing at random, or does not initialise it at all.
    """
    found = [f"lacks {_counted(missing)}"] if missing else []
    found += [f"has {_counted(unknown)}, which the model has not"] if unknown else []
    if found:
        raise NormLabError(f"{folder} {' and '.join(found)}; expected a folder of save_pretrained, unchanged")


def _counted(names: Collection[str]) -> str:
    return f"{counted(len(names), 'weight')} (the first is {min(names)})"


def tokenizer_of(folder: str | None) -> str:
    """Tokenizer for text files: the model's own if its weights are used, else `bytes`."""
    if folder is None or not Path(folder).is_dir():
        return folder or "bytes"
    own = Path(folder) / "tokenizer.json"
    return str(own) if own.is_file() else "bytes"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the library's warnings and progress bars."""
    logging = library().utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise NormLabError(f"{path.parent} has no config.json; expected a Hugging Face model or a NormLab run")
    values = read_json(path)
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise NormLabError(f"{path} names no model_type; expected the config.json of a Hugging Face model")
    advice = "expected a model type that this version of transformers knows"
    with quiet(), in_one_line(f"{path}: not a configuration", advice):
        return library().AutoConfig.from_pretrained(path, trust_remote_code=False)


def _from_hub(name: str) -> Any:
    auto = library().AutoConfig
    with quiet():
        try:
            return auto.from_pretrained(name, trust_remote_code=False, local_files_only=True)
        except Exception as error:
            # Asked for nothing but what is here: the library's word on the network would mislead.
            missing = error
        if not is_reachable():
            known = "is neither a scheme nor a model on this machine, and the hub cannot be reached"
            raise NormLabError(f"{name!r} {known}; {_ADVICE}") from missing
        with in_one_line(f"{name!r} cannot be loaded", _ADVICE):
            return auto.from_pretrained(name, trust_remote_code=False)
