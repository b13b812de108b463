"""Initialise weights that a checkpoint does not contain: missing parameters, and new rows of a resized vocabulary."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.models.decoder import Decoder
from normlab.utils.uninitialized import poison_, refuse_uninitialised


def mark_initialised(decoder: Decoder) -> None:
    """Mark the decoder's weights as initialised for transformers, except on the meta device."""
    for parameter in decoder.parameters():
        parameter._is_hf_initialized = not parameter.is_meta  # type: ignore[attr-defined]


@torch.no_grad()
def init_missing_(decoder: Decoder, module: nn.Module) -> None:
    """Initialise those of the module's own parameters that are not marked, by the scheme's rules."""
    lacking = {id(p) for p in module.parameters(recurse=False) if not getattr(p, "_is_hf_initialized", False)}
    if not lacking:
        return
    for parameter in module.parameters(recurse=False):
        if id(parameter) in lacking:
            poison_(parameter)
    roles = [role for role in decoder.find_roles() if id(role.parameter) in lacking]
    reset = getattr(module, "reset_parameters", None)
    if reset is not None and any(role.role == "vector" for role in roles):
        reset()
    config = decoder.config
    decoder.stack.bound.init_(roles, std=config.init_std, zero_outputs=config.zero_outputs)
    refuse_uninitialised(module, decoder.stack.scheme.name, decoder, recurse=False)


@torch.no_grad()
def resize_vocabulary_(decoder: Decoder, size: int, *, mean: bool = True) -> None:
    """Resize to `size` entries; new ones are the mean of the old ones, or drawn by the scheme's rule."""
    if size < 1:
        raise NormLabError(f"a vocabulary needs at least 1 entry, got {size}")
    config = dataclasses.replace(decoder.config, vocab_size=size)
    # Parameters with another shape at the new size have one entry per token.
    layout = dict(Decoder(config, device="meta").named_parameters())
    changed = {name: p for name, p in decoder.named_parameters() if p.shape != layout[name].shape}
    decoder.config, decoder.embedding.num_embeddings, decoder.head.vocab_size = config, size, size
    for name, old in changed.items():
        place, _, attribute = name.rpartition(".")
        owner, new = decoder.get_submodule(place), nn.Parameter(old.new_empty(layout[name].shape), old.requires_grad)
        setattr(owner, attribute, new)
        init_missing_(decoder, owner)
        if mean:
            new.copy_(old.mean(0))
        new[: len(old)] = old[:size]
    mark_initialised(decoder)
    # A mean of unit vectors is shorter than one: re-apply the constraint.
    decoder.after_step()
