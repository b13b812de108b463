"""Weights that a checkpoint does not bring: those it lacks, and the rows of a vocabulary that grows."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.models.decoder import Decoder
from normlab.utils.uninitialized import poison_, refuse_uninitialised


def mark_initialised(decoder: Decoder) -> None:
    """Tell the library that the decoder has filled its own weights; on the meta device it has not."""
    for parameter in decoder.parameters():
        parameter._is_hf_initialized = not parameter.is_meta  # type: ignore[attr-defined]


@torch.no_grad()
def fill_lacking_(decoder: Decoder, module: nn.Module) -> None:
    """Give the module's own parameters that are not marked their first values, by the scheme's rules."""
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
    """Keep the first `size` entries; new ones are the mean of the old, or drawn as the scheme draws them."""
    if size < 1:
        raise NormLabError(f"a vocabulary needs at least 1 entry, got {size}")
    config = dataclasses.replace(decoder.config, vocab_size=size)
    # What has another shape in the layout of the new size has one entry for each token.
    layout = dict(Decoder(config, device="meta").named_parameters())
    changed = {name: p for name, p in decoder.named_parameters() if p.shape != layout[name].shape}
    decoder.config, decoder.embedding.num_embeddings, decoder.head.vocab_size = config, size, size
    for name, old in changed.items():
        place, _, attribute = name.rpartition(".")
        owner, new = decoder.get_submodule(place), nn.Parameter(old.new_empty(layout[name].shape), old.requires_grad)
        setattr(owner, attribute, new)
        fill_lacking_(decoder, owner)
        if mean:
            new.copy_(old.mean(0))
        new[: len(old)] = old[:size]
    mark_initialised(decoder)
    # A mean of unit vectors is shorter than they are.
    decoder.after_step()
