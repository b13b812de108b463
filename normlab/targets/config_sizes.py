"""Read and change depth, width and vocabulary in any Hugging Face configuration, by field names, not by architecture.

`num_hidden_layers`, `n_layer` and `decoder_layers` all say how many blocks there are, `n_embd` and `d_model` how wide
the state is; the library's own attribute map knows the synonyms of the chief ones. A configuration may hold others
(text and vision): each part keeps its own proportions. Changes are made to copies.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from normlab.errors import NormLabError

Changes = dict[str, tuple[Any, Any]]
"""(old, new) value of every changed field, by name."""

_DEPTH = re.compile(r"((num|n)_)?((hidden|encoder|decoder|transformer)_)?(layers?|blocks?)|depth")
_HEADS = re.compile(r"(\w+_)?heads?")
_HEAD_SIZE = re.compile(r"(\w+_)?(head_dim|head_size|d_kv|rotary_dim)")
_WIDTH = re.compile(
    r"(\w+_)?(hidden_size|intermediate_size|embedding_size|ffn_hidden_size|hidden_dim|ffn_dim|mlp_dim|embed_dim|proj_dim"
    r"|projection_dim|lora_rank|d_model|d_ff|d_inner|n_embd|n_inner)|dim"
)
_QUERY_SCALE = re.compile(r"query_pre_attn_scalar")
_INITIAL_STD = re.compile(r"initializer_range|initializer_std|init_std")
_DROPOUT = re.compile(r"(\w+_)?(dropout|pdrop|layerdrop|drop_rate|dropout_rate|dropout_prob|drop_path_rate)(_\w+)?")
_VOCABULARY = re.compile(r"(.*_)?vocab_size")
_TOKEN = re.compile(r"\w+_token_(id|index)")

_FEWEST_HEADS, _SMALLEST_HEAD, _MULTIPLE = 4, 16, 8
"""Heads are made smaller rather than fewer than this, and not smaller than that; sizes are multiples of eight, so that
rotary embeddings can pair even a quarter of a head."""
_NARROWEST = 32


def parts(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The configuration and its sub-configurations, each with the prefix of its field names."""
    yield prefix, config
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if hasattr(inner, "to_dict"):
            yield from parts(inner, f"{prefix}{name}.")


def with_depth(config: Any, depth: int, native: int) -> Any:
    """The configuration at another depth: all stacks change by the same factor, and lists with one entry per block.

    Such a list is cut, or continued from its beginning: a pattern of block types goes on.
    """
    changed = copy.deepcopy(config)
    for _, part in parts(changed):
        old = {name: value for name, value in _integers(part) if _DEPTH.fullmatch(name)}
        new = {value: max(1, round(value * depth / native)) for value in old.values()}
        for name, value in list(part.to_dict().items()):
            if isinstance(value, list) and len(value) in new and not _TOKEN.fullmatch(name):
                setattr(part, name, [value[i % len(value)] for i in range(new[len(value)])])
        for name, value in old.items():
            setattr(part, name, new[value])
    return changed


def width_of(config: Any) -> int | None:
    """Hidden width; that of the text model if there are several."""
    for part in (config, config.get_text_config()):
        if _is_integer(width := getattr(part, "hidden_size", None)):
            return width
    return None


def with_width(config: Any, width: int) -> tuple[Any, Changes]:
    """The configuration at another width, rounded to whole heads; other sizes change in proportion."""
    own = width_of(config)
    if own is None or width < _NARROWEST:
        raise NormLabError(f"a width of {own} cannot be made {width}; expected one from {_NARROWEST} on")
    return _changed(config, lambda part: _resized(part, width / own))


def shrunk(config: Any, factor: int, *, length: int) -> tuple[Any, Changes]:
    """A smaller configuration: widths divided by `factor`, same gain of matrices, at most `length` image patches."""
    own = width_of(config) or 0
    if own / factor < _NARROWEST:
        most = own // _NARROWEST
        raise NormLabError(
            f"cannot shrink a width of {own} by {factor}: {_NARROWEST} must remain; try at most {most}"
            if most
            else "cannot shrink what does not say its width (hidden_size); leave out --shrink"
        )
    return _changed(
        config, lambda part: _resized(part, 1 / factor) | _same_gain(part, factor) | _smaller_image(part, length)
    )


def with_vocabulary(config: Any, vocabulary: int) -> tuple[Any, Changes]:
    """The configuration with the data's vocabulary, its own special tokens, and one more for a mask.

    A model that sees few of its tokens first learns never to say the others: all its states turn to one direction, and
    it would be said to collapse. What is checked is the blocks between embedding and head, and those stay as they are.
    """
    small, changes = _changed(config, lambda part: _fewer_tokens(part, vocabulary))
    return small, {name: change for name, change in changes.items() if not _TOKEN.fullmatch(name.rpartition(".")[2])}


def without_dropout(config: Any) -> tuple[Any, Changes]:
    """The configuration with all dropout rates at zero, so that measurements are deterministic."""
    return _changed(config, _no_dropout)


def without_cache(config: Any) -> Any:
    """The configuration without a key-value cache, for training."""
    return _changed(config, lambda part: {"use_cache": (True, False)} if getattr(part, "use_cache", False) else {})[0]


def special_tokens(config: Any) -> set[int]:
    """Ids of special tokens (padding, end, image), which data must not use."""
    found = [value for _, part in parts(config) for name, value in part.to_dict().items() if _TOKEN.fullmatch(name)]
    return {token for value in found for token in (value if isinstance(value, list) else [value]) if _is_integer(token)}


def room_for_tokens(config: Any) -> int | None:
    """Number of tokens that data may use: neither special nor the mask; None without a vocabulary."""
    own = getattr(config.get_text_config(), "vocab_size", None)
    return own - len(special_tokens(config)) - 1 if _is_integer(own) else None


def _changed(config: Any, change: Callable[[Any], Changes]) -> tuple[Any, Changes]:
    """A copy with a change applied to each of its parts, and the results of the change."""
    changed, changes = copy.deepcopy(config), {}
    for prefix, part in parts(changed):
        for name, (old, new) in change(part).items():
            setattr(part, name, new)
            changes[prefix + name] = (old, new)
    return changed, changes


def _resized(part: Any, ratio: float) -> Changes:
    fields = dict(_integers(part))
    width, heads = getattr(part, "hidden_size", None), getattr(part, "num_attention_heads", 1)
    # Stages of different widths, each with its own number of heads, stay as they are.
    if not _is_integer(width) or not _is_integer(heads):
        return {}
    own_head_size = any(_HEAD_SIZE.fullmatch(name) for name in fields)
    head = getattr(part, "head_dim", None) or width // heads
    # Some models make all heads together wider or narrower than the state.
    room = width * ratio * (heads * head / width if own_head_size else 1.0)
    new_head = _head_for(head, room)
    new_heads = max(1, round(room / new_head))
    new_width = _rounded(width * ratio) if own_head_size else new_heads * new_head

    def resized(name: str, size: int) -> int:
        if _HEADS.fullmatch(name):
            return _divisor_near(new_heads, size * new_heads / heads)
        if _HEAD_SIZE.fullmatch(name):
            return new_head if size == head else _rounded(size * new_head / head)
        if _QUERY_SCALE.fullmatch(name):
            return max(1, round(size * new_head / head))
        if _WIDTH.fullmatch(name):
            return new_width if size == width else _rounded(size * new_width / width)
        return size

    return {name: (size, new) for name, size in fields.items() if (new := resized(name, size)) != size}


def _same_gain(part: Any, factor: int) -> Changes:
    """Multiply initial standard deviations by √factor: the gain of a matrix is std · √width.

    Left as they are, 0.02 at a width of 4096 is a gain of 1.28, and at 128 of 0.23: the branches of another model.
    """
    found = {name: value for name, value in part.to_dict().items() if _INITIAL_STD.fullmatch(name)}
    return {name: (std, float(f"{std * math.sqrt(factor):.4g}")) for name, std in found.items() if std and factor > 1}


def _no_dropout(part: Any) -> Changes:
    found = {name: value for name, value in part.to_dict().items() if _DROPOUT.fullmatch(name)}
    return {name: (value, 0.0) for name, value in found.items() if isinstance(value, float) and value > 0.0}


def _head_for(head: int, width: float) -> int:
    """Head size, halved until there are enough heads."""
    size = head
    while width / size < _FEWEST_HEADS and size // 2 >= _SMALLEST_HEAD:
        size //= 2
    return size if size == head else _rounded(size)


def _divisor_near(whole: int, wished: float) -> int:
    """The divisor of `whole` nearest to `wished` in ratio; key heads must divide query heads."""
    return min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(math.log(n / wished)))


def _rounded(size: float) -> int:
    return max(_MULTIPLE, _MULTIPLE * round(size / _MULTIPLE))


def _fewer_tokens(part: Any, vocabulary: int) -> Changes:
    own = getattr(part, "vocab_size", None)
    special = special_tokens(part)
    size = vocabulary + len(special) + 1
    if not isinstance(own, int) or own <= size:
        return {}
    moved = {token: vocabulary + place for place, token in enumerate(sorted(special))}
    # Some decoders say theirs once more (Marian's decoder_vocab_size).
    again = [name for name, value in _integers(part) if _VOCABULARY.fullmatch(name) and value == own]
    changes: Changes = dict.fromkeys(("vocab_size", *again), (own, size))
    for name, value in part.to_dict().items():
        if _TOKEN.fullmatch(name) and value is not None:
            changes[name] = (value, [moved[t] for t in value] if isinstance(value, list) else moved[value])
    return changes


def _smaller_image(part: Any, length: int) -> Changes:
    size, patch = getattr(part, "image_size", None), getattr(part, "patch_size", None)
    if not isinstance(size, int) or not isinstance(patch, int):
        return {}
    small = patch * max(2, round(math.sqrt(length)))
    return {"image_size": (size, small)} if small < size else {}


def _integers(part: Any) -> Iterator[tuple[str, int]]:
    return ((name, value) for name, value in part.to_dict().items() if _is_integer(value) and value > 0)


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
