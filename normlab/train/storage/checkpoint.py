"""Checkpoints of model, optimiser, data loader and random states; resumable on any number of ranks.

    checkpoints/step-00000100/
      manifest.json     step, ranks, versions, size and SHA-256 of every other file; written last
      state.json        state of the training loop, the optimiser's settings, the shape of every tensor
      rng/              random states, one file per rank
      tensors/          weights and the optimiser's tensors: torch's distributed checkpoint, in safetensors files

Everything is JSON or safetensors: nothing is unpickled, so that loading a checkpoint runs no foreign code. A checkpoint
is written to a hidden folder and renamed, so that it is complete or absent; hashes show later corruption. All ranks
must see the same folder.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shared
from torch.distributed.checkpoint.state_dict_saver import save as save_shared

from normlab.errors import NormLabError
from normlab.train.distributed import ALONE, Group
from normlab.train.storage.rng import restore_random_states, write_random_states
from normlab.train.storage.weights import check_shapes, shapes_of, weights_of
from normlab.utils.files import digest, file_error, read_json, sync, write_json
from normlab.utils.versions import versions

Digests = dict[str, tuple[int, str]]
"""Size and SHA-256 of files, by their path in the checkpoint."""
States = dict[str, dict[str, Any]]
"""Optimiser state of each parameter, by the parameter's name."""

_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})(\.old)?")
# A file is built in memory before it is written.
_BYTES_A_FILE = 2**30
# How a step is computed, not what it is: the resuming machine decides.
_NOT_SETTINGS = ("params", "foreach", "fused", "capturable", "differentiable")


class Checkpoints:
    """The checkpoints of one run, of which the newest `keep` are kept. All ranks make every call together."""

    def __init__(self, folder: Path, keep: int = 2, group: Group = ALONE):
        if keep < 1:
            raise NormLabError(f"keep must be at least 1, got {keep}")
        self.folder, self.keep, self.group = folder, keep, group

    def save(self, step: int, *, model: nn.Module, optimiser: torch.optim.Optimizer, extra: Mapping[str, Any]) -> None:
        """Write a checkpoint, then remove old ones, and later ones that a rollback has left.

        `extra` is anything JSON can hold; that of the first rank is saved. Random states are added here.
        """
        partial = self.folder / f".step-{step:08d}.partial"
        weights, states = weights_of(model), _states(model, optimiser)
        state = {
            "extra": extra,
            "model": shapes_of(weights),
            "optimiser": _outline(states),
            "groups": _groups(model, optimiser),
        }
        try:
            self.group.together(lambda: self._prepare(partial, state))
            self.group.together(lambda: write_random_states(self._random_states(partial), self.group.device))
            self._write_tensors(partial / "tensors", _tensors(weights, states))
            digests = self._digests(partial)
            self.group.together(lambda: self._publish(partial, step, digests))
        except BaseException:
            if self.group.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def load(self, model: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[int, dict[str, Any]] | None:
        """Restore the newest valid checkpoint in place; returns its step and `extra`, or None if there is none.

        For a corrupt one there is a warning, and the one before it is used. Random states are restored if the number
        of ranks is that of the saving run.
        """
        names = self.group.broadcast([folder.name for folder in self._folders()])
        torn: list[str] = []
        for folder in (self.folder / name for name in reversed(names)):
            fault = self._fault(folder)
            if fault is None:
                return self._restore(folder, model, optimiser)
            torn.append(f"{folder.name}: {fault}")
            if self.group.is_main:
                warnings.warn(f"torn checkpoint {folder}: {fault}; trying the one before", stacklevel=2)
        if torn:
            raise NormLabError(f"no whole checkpoint in {self.folder} ({'; '.join(torn)}); remove it to start anew")
        return None

    def load_weights(self, model: nn.Module) -> None:
        """Load only the weights of the newest valid checkpoint into a model."""
        whole = [folder for folder in reversed(self._folders()) if self._fault(folder) is None]
        if not whole:
            raise NormLabError(f"there is no whole checkpoint in {self.folder}; let the run go on to its next one")
        weights = weights_of(model)
        check_shapes(whole[0], read_json(whole[0] / "state.json")["model"], shapes_of(weights))
        with _errors_in_one_line("read", whole[0]):
            reader = HuggingFaceStorageReader(str(whole[0] / "tensors"))
            load_shared(_tensors(weights, {}), storage_reader=reader, no_dist=self.group.world == 1)

    def latest(self) -> Path | None:
        """The folder of the newest checkpoint, not verified."""
        return next(reversed(self._folders()), None)

    # -- writing ---------------------------------------------------------------------------------------------------

    def _prepare(self, partial: Path, state: Mapping[str, Any]) -> None:
        if not self.group.is_main:
            return
        for leftover in self.folder.glob(".step-*.partial"):
            shutil.rmtree(leftover)
        (partial / "tensors").mkdir(parents=True)
        (partial / "rng").mkdir()
        write_json(partial / "state.json", state)

    def _write_tensors(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        writer = HuggingFaceStorageWriter(str(folder), _files(tensors, self.group.world), save_distributed=True)
        with _errors_in_one_line("write", folder):
            save_shared(tensors, storage_writer=writer, no_dist=self.group.world == 1)

    def _publish(self, partial: Path, step: int, digests: Mapping[str, Any]) -> None:
        if not self.group.is_main:
            return
        facts = {"step": step, "ranks": self.group.world, "versions": versions(), "files": digests}
        write_json(partial / _MANIFEST, facts)
        for folder in (partial / "tensors", partial / "rng", partial):
            sync(folder)
        final = self.folder / f"step-{step:08d}"
        if final.exists():
            aside = final.with_suffix(".old")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(final, aside)
        os.replace(partial, final)
        sync(self.folder)
        self._remove_all_but(final)

    def _remove_all_but(self, newest: Path) -> None:
        folders = self._folders()
        earlier = [folder for folder in folders[: folders.index(newest)] if folder.suffix != ".old"]
        kept = {newest, *earlier[::-1][: self.keep - 1]}
        for folder in set(folders) - kept:
            shutil.rmtree(folder)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _folders(self) -> list[Path]:
        """Oldest first. One that was replaced by a new one of the same step comes just before it."""
        if not self.folder.is_dir():
            return []
        found = [(match, path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for match, path in sorted(found, key=lambda pair: (int(pair[0][1]), pair[0][2] is None))]

    def _fault(self, folder: Path) -> str | None:
        """What is wrong with a checkpoint, in a few words; None: it is valid."""
        try:
            expected = self.group.together(lambda: _read_manifest(folder) if self.group.is_main else {})[0]
            found = self._digests(folder)
        except NormLabError as error:
            return str(error)
        if missing := expected.keys() - found.keys():
            return f"{min(missing)} is missing"
        if unexpected := found.keys() - expected.keys():
            return f"{min(unexpected)} does not belong to it"
        for name, (size, sha256) in expected.items():
            if found[name][0] != size:
                return f"{name} has {found[name][0]} bytes instead of {size}"
            if found[name][1] != sha256:
                return f"{name} has changed since it was written"
        return None

    def _digests(self, folder: Path) -> Digests:
        """Size and hash of every file but the manifest; each rank reads a part of the files."""
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _MANIFEST)
        mine = files[self.group.rank :: self.group.world]
        parts = self.group.together(lambda: {str(path.relative_to(folder)): digest(path) for path in mine})
        return {name: facts for part in parts for name, facts in part.items()}

    def _restore(self, folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[int, dict[str, Any]]:
        manifest, state = read_json(folder / _MANIFEST), read_json(folder / "state.json")
        weights = weights_of(model)
        check_shapes(folder, state["model"], shapes_of(weights))
        _check_groups(folder, state["groups"], _groups(model, optimiser))
        states = _room(model, state["optimiser"])
        with _errors_in_one_line("read", folder):
            reader = HuggingFaceStorageReader(str(folder / "tensors"))
            load_shared(_tensors(weights, states), storage_reader=reader, no_dist=self.group.world == 1)
        _give(optimiser, model, states, state["groups"])
        if manifest["ranks"] == self.group.world:
            restore_random_states(self._random_states(folder), self.group.device)
        return manifest["step"], state["extra"]

    def _random_states(self, folder: Path) -> Path:
        return folder / "rng" / f"rank-{self.group.rank:05d}.safetensors"


def _files(tensors: Mapping[str, torch.Tensor], world: int) -> dict[str, int]:
    """The file of each tensor, such that no file is too large to build in memory."""
    places, size = {}, 0
    for name, tensor in tensors.items():
        places[name] = 1 + size // (_BYTES_A_FILE * world)
        size += tensor.numel() * tensor.element_size()
    return places


def _read_manifest(folder: Path) -> Digests:
    facts = read_json(folder / _MANIFEST)
    try:
        if f"step-{facts['step']:08d}" != folder.name.removesuffix(".old"):
            raise NormLabError(f"{_MANIFEST} is that of step {facts['step']}")
        return {str(name): (int(size), str(sha256)) for name, (size, sha256) in facts["files"].items()}
    except (KeyError, TypeError, AttributeError):
        raise NormLabError(f"{_MANIFEST} is not one") from None


@contextmanager
def _errors_in_one_line(action: str, path: Path) -> Iterator[None]:
    """Turn torch's CheckpointException into the error of one rank; silence the warning of a single process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, OSError):
            raise file_error(action, cause, path) from cause
        raise cause from None
    except OSError as error:
        raise file_error(action, error, path) from error


# -- the model and its optimiser, by name --------------------------------------------------------------------------


def _order(model: nn.Module, optimiser: torch.optim.Optimizer) -> list[str]:
    """The names of the optimiser's parameters, in the order of their indices in its state dict."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    try:
        return [names[id(parameter)] for group in optimiser.param_groups for parameter in group["params"]]
    except KeyError:
        raise NormLabError(
            "the optimiser has a parameter that the model does not have; build it from the model"
        ) from None


def _states(model: nn.Module, optimiser: torch.optim.Optimizer) -> States:
    order = _order(model, optimiser)
    return {order[i]: state for i, state in optimiser.state_dict()["state"].items()}


def _tensors(weights: Mapping[str, torch.Tensor], states: States) -> dict[str, torch.Tensor]:
    """Weights and optimiser tensors in one flat dictionary."""
    flat = {f"model.{name}": tensor for name, tensor in weights.items()}
    for name, state in states.items():
        flat |= {f"optimiser.{name}.{key}": v for key, v in state.items() if isinstance(v, torch.Tensor)}
    return flat


def _outline(states: States) -> dict[str, dict[str, Any]]:
    """The states with shape and dtype in place of each tensor."""
    return {name: {key: _kind(value) for key, value in state.items()} for name, state in states.items()}


def _kind(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}


def _room(model: nn.Module, outline: Mapping[str, Mapping[str, Any]]) -> States:
    """Zero tensors for an outline, sharded like the parameter where they have its shape."""
    parameters = dict(model.named_parameters())
    return {
        name: {key: _blank(parameters[name], kind) for key, kind in state.items()} for name, state in outline.items()
    }


def _blank(parameter: torch.Tensor, kind: Any) -> Any:
    if not isinstance(kind, dict):
        return kind
    dtype = getattr(torch, kind["dtype"])
    if list(parameter.shape) == kind["shape"]:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(kind["shape"], dtype=dtype)


def _groups(model: nn.Module, optimiser: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimiser's parameter groups as JSON, with parameters by name."""
    order = _order(model, optimiser)
    return [
        {key: [order[i] for i in value] if key == "params" else _plain(value) for key, value in group.items()}
        for group in optimiser.state_dict()["param_groups"]
    ]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _give(optimiser: torch.optim.Optimizer, model: nn.Module, states: States, saved: list[dict[str, Any]]) -> None:
    numbered = {i: states[name] for i, name in enumerate(_order(model, optimiser)) if name in states}
    present = optimiser.state_dict()["param_groups"]
    groups = [_settings(now, before) for now, before in zip(present, saved, strict=True)]
    optimiser.load_state_dict({"state": numbered, "param_groups": groups})


def _settings(present: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    return present | {k: _as_now(present.get(k), v) for k, v in saved.items() if k not in _NOT_SETTINGS}


def _as_now(present: Any, saved: Any) -> Any:
    """Convert a setting read from JSON to a tensor or tuple if the current value is one."""
    if isinstance(present, torch.Tensor):
        return torch.full_like(present, saved)
    return tuple(saved) if isinstance(present, tuple) else saved


def _check_groups(folder: Path, saved: list[dict[str, Any]], present: list[dict[str, Any]]) -> None:
    if [group["params"] for group in saved] != [group["params"] for group in present]:
        raise NormLabError(f"{folder} was saved with other optimiser groups; go on with the options of the saving run")
