"""Export and load the weights of a model as one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from normlab.errors import NormLabError
from normlab.probes.sharded import reshard, whole
from normlab.train.distributed import ALONE, Group, shared_like
from normlab.utils.files import file_error, replacing


def export_safetensors(model: nn.Module, path: Path, metadata: Mapping[str, Any], group: Group = ALONE) -> None:
    """Write the full weights to one safetensors file, with `metadata` (anything JSON can hold) in its header.

    All ranks call it; the first one writes. Tied weights are stored once.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in weights_of(model).items():
        full = whole(tensor)
        if group.is_main:
            weights[name] = full.cpu().contiguous()
    if not group.is_main:
        return
    with replacing(path) as part, _safetensors_errors("write", path):
        save_file(weights, part, {"format": "pt", "normlab": json.dumps(metadata)})
        _sort_metadata(part)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors file by name, in place, so that equal weights make equal files.

    safetensors writes a hash map, whose order is another one each time. The header is its length in 8 bytes, then JSON.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size)
        if len(text) == size:
            file.seek(8)
            file.write(text)


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata that `export_safetensors` wrote."""
    with _safetensors_errors("read", path), safe_open(path, "pt") as file:
        return json.loads((file.metadata() or {}).get("normlab", "{}"))


def load_weights(path: Path, model: nn.Module) -> None:
    """Load exported weights into a model, which may be sharded over ranks."""
    weights = weights_of(model)
    with _safetensors_errors("read", path), safe_open(path, "pt") as file:
        found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        check_shapes(path, found, shapes_of(weights))
        for name, tensor in weights.items():
            tensor.copy_(shared_like(file.get_tensor(name), tensor))


@contextmanager
def _safetensors_errors(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise NormLabError(f"cannot {action} {path}: {error}; check the file and the free space") from None
    except OSError as error:
        raise file_error(action, error, path) from error


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; a tied one under its first name."""
    reshard(model)
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            raise NormLabError(f"{name} is a {type(tensor).__name__}; expected a model whose state is tensors alone")
        found.setdefault(id(tensor), (name, tensor.detach()))
    return dict(found.values())


def shapes_of(weights: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """The shape of every tensor, as lists for JSON."""
    return {name: list(tensor.shape) for name, tensor in weights.items()}


def check_shapes(path: Path, found: Mapping[str, list[int]], expected: Mapping[str, list[int]]) -> None:
    """Raise if the tensors are those of another model; the error names the first that differs."""
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise NormLabError(
                f"{path} holds another model: {name} is {found.get(name, 'absent')} there and "
                f"{expected.get(name, 'absent')} here; build the model from the configuration it was saved with"
            )
