"""Hugging Face models as targets: from an id, a folder or a config.json, with random or published weights.

Nothing here knows an architecture: the library's own tables say which class a configuration makes and what it is for.
No code from a repository is run, and weights are read from safetensors alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from normlab.errors import NormLabError, in_one_line
from normlab.models.estimate import count_parameters
from normlab.models.memory_check import check_memory_for_parameters
from normlab.probes.blocks import find_stacks, sole_blocks
from normlab.probes.start import Fresh
from normlab.targets import config_sizes, config_tasks, hub
from normlab.targets.data import MADE_UP, token_data
from normlab.targets.target import Target
from normlab.targets.tasks import Workload
from normlab.utils.seeded import seeded


class Purpose(NamedTuple):
    """A kind of model: its mapping in transformers, the auto class that builds it, and its workload."""

    listed: str
    makes: str
    task: Callable[..., Workload]


PURPOSES = (
    Purpose("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM", config_tasks.SequenceToSequence),
    Purpose("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM", config_tasks.MaskedWorkload),
    Purpose("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM", config_tasks.Causal),
    Purpose("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "AutoModelForImageTextToText", config_tasks.Causal),
    Purpose("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "AutoModelForImageClassification", config_tasks.ImageWorkload),
    Purpose("MODEL_MAPPING", "AutoModel", config_tasks.headless),
)
"""In the order of preference where a configuration names no class: an encoder can be listed as a causal model, too."""

_MOST_GROWTH = 3
"""Largest factor by which twice as many blocks may increase the parameters; 2 if all blocks are alike."""


class HuggingFaceTarget(Target):
    """A Hugging Face model configuration as a target: at its own size, at another, or shrunk."""

    kind = "hugging face"

    def __init__(
        self,
        source: Any,
        *,
        data: str = "bigram",
        vocabulary: int = 64,
        length: int = 48,
        batch_size: int = 8,
        depth: int | None = None,
        width: int | None = None,
        shrink: int | None = None,
        weights: bool = False,
        blocks: str | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        config, self.name = hub.load_config(source)
        self._published = config
        self._shares, self._weights = False, hub.weights_folder(source) if weights else None
        self._purpose = purpose_of(config, self.name)
        vocabulary = max(2, min(vocabulary, config_sizes.room_for_tokens(config) or vocabulary))
        tokens = token_data(data, vocabulary=vocabulary, tokenizer=hub.tokenizer_of(self._weights))
        with in_one_line(f"{self.name}: its sizes cannot be changed", "pass a live module with a batch"):
            self._config = self._prepared(config, shrink, width, tokens.vocabulary, length)
            self.width = config_sizes.width_of(self._config)
            self.blocks = blocks or self._shared_blocks()
            self._native = self.depth = self._blocks(self._config)
            self.resizable = self._what_can_change()
        self.depth = self._allowed("depth", depth, self._native)
        with in_one_line(f"{self.name}: no batch can be made for it", "pass a live module with a batch"):
            self.task = self._purpose.task(self._config, tokens, length=length, batch_size=batch_size)
        if weights and data in MADE_UP:
            self.notes += (f"trained weights on {data} tokens, which are no text; name one with --data FILE",)
        self._segments = False
        self.check_room()
        shallow = {"depth": min(2, self._native)} if "depth" in self.resizable else {}
        self.try_out(f"{self.name}: does not run", "pass a live module with a batch, or try another size", **shallow)
        self._segments = self._needs_segments(**shallow)

    def batches(self, seed: int = 0) -> Iterator[Any]:
        for batch in super().batches(seed):
            yield {**batch, "token_type_ids": two_segments(batch["input_ids"])} if self._segments else batch

    def _needs_segments(self, **size: int) -> bool:
        """Whether some parameters are used only if a batch has two segments (XLNet)."""
        if self._weights is not None or not isinstance(self.task, config_tasks.ModelTokens):
            return False
        if "token_type_ids" not in inspect.signature(self._laid_out(self._sized(1, None)).forward).parameters:
            return False
        model = self.build(**size)
        batch = next(self.batches())
        idle = self._idle(model, batch)
        if not idle:
            return False
        try:
            return self._idle(model, {**batch, "token_type_ids": two_segments(batch["input_ids"])}) < idle
        except Exception:
            # It has one segment, or these ids mean something else to it.
            return False

    def _idle(self, model: nn.Module, batch: Any) -> int:
        """Number of parameters without a gradient."""
        model.zero_grad()
        with seeded(0):
            self.loss(model, batch).backward()
        return sum(parameter.grad is None for parameter in model.parameters())

    def fresh(self, size: str, depth: int | None = None) -> list[Fresh]:
        """The published model at its own width and vocabulary, with random weights; empty if weights are loaded."""
        if self._weights is not None or not self.task.has_head or not isinstance(self.task, config_tasks.ModelTokens):
            return []
        config, _ = config_sizes.without_dropout(config_sizes.without_cache(self._published))
        name = f"its own size, width {config_sizes.width_of(config)}"
        parameters = count_parameters(self._laid_out(config))
        length = self.task.length
        return [Fresh(name, lambda: self._from(config), config_tasks.logits_of, parameters, length=length)]

    def _prepared(self, config: Any, shrink: int | None, width: int | None, vocabulary: int, length: int) -> Any:
        """The configuration to build; adds notes on what was changed in it."""
        if self._weights is not None and (shrink or width):
            raise NormLabError(f"{self.name}: trained weights have one size; leave out --weights or the new size")
        config = config_sizes.without_cache(config)
        if shrink:
            config, changes = config_sizes.shrunk(config, shrink, length=length)
            self._note(f"{_told(changes)} (--shrink {shrink})", changes)
        elif width:
            config, changes = config_sizes.with_width(config, width)
            self._note(_told(changes), changes)
        if self._weights is None:
            config, changes = config_sizes.with_vocabulary(config, vocabulary)
            self._note(f"{_told(changes)}, as many as the data has", changes)
        config, changes = config_sizes.without_dropout(config)
        self._note(f"no dropout: {_told(changes)}", changes)
        return config

    def _note(self, text: str, changes: config_sizes.Changes) -> None:
        self.notes += (text,) if changes else ()

    def _what_can_change(self) -> frozenset[str]:
        if self._weights is not None:
            return frozenset()
        own, twice = (self._laid_out(self._sized(times * self._native, None)) for times in (1, 2))
        # Blocks of a hierarchy (Swin's stages) are wider one by one: twice as many have dozens of times the parameters.
        alike = count_parameters(twice) <= _MOST_GROWTH * count_parameters(own)
        deeper = self._blocks_of(twice) == 2 * self._native and alike
        known = {"depth": deeper, "width": self.width is not None}
        return frozenset(what for what, can in known.items() if can)

    def _blocks(self, config: Any) -> int:
        return self._blocks_of(self._laid_out(config))

    def _blocks_of(self, model: nn.Module) -> int:
        """Number of blocks that a model runs; a shared block counts each time (ALBERT)."""
        listed = len(find_stacks(model, self.blocks)[0].blocks)
        said = getattr(model.config, "num_hidden_layers", None)
        return said if self._shares and isinstance(said, int) and said % listed == 0 else listed

    def _shared_blocks(self) -> str | None:
        """Pattern of a block that is alone in its list and shared by all layers of the configuration."""
        model = self._laid_out(self._config)
        alone = sole_blocks(model)
        count = getattr(self._config, "num_hidden_layers", None)
        self._shares = bool(alone) and isinstance(count, int) and count > 1
        return alone if self._shares else None

    def _make(self, depth: int, width: int | None, seed: int) -> nn.Module:
        if self._weights is not None:
            return hub.load_weights(self._weights, self._purpose.makes, self._config)
        self.check_room(depth=depth, width=width)
        return self._from(self._sized(depth, width))

    def _sized(self, depth: int, width: int | None) -> Any:
        config = self._config
        if width is not None and width != self.width:
            config, _ = config_sizes.with_width(config, width)
        return config_sizes.with_depth(config, depth, self._native)

    def _laid_out(self, config: Any) -> nn.Module:
        """The model on the meta device, which needs no memory."""
        with torch.device("meta"):
            return self._from(config)

    def _from(self, config: Any) -> nn.Module:
        auto = getattr(hub.library(), self._purpose.makes)
        with hub.quiet(), in_one_line(f"{self.name}: {self._purpose.makes} cannot build it", "check its configuration"):
            # A copy, since the library writes to it. In fp32, whatever format the weights were published in.
            return auto.from_config(copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False)

    def check_room(self, *, depth: int | None = None, width: int | None = None) -> None:
        blocks, width = depth or self.depth, width or self.width
        parameters = self._parameters(min(blocks, self._native), width)
        if blocks > self._native:
            # From one block more than it has, not from as many as were asked for: laying out many takes long.
            parameters += (blocks - self._native) * (self._parameters(self._native + 1, width) - parameters)
        what = f"{self.name} with {parameters / 1e9:.1f}B parameters"
        check_memory_for_parameters(parameters, self.device, what, "a larger --shrink, or smaller --depths")

    def _parameters(self, depth: int, width: int | None) -> int:
        return count_parameters(self._laid_out(self._sized(depth, width)))


def purpose_of(config: Any, name: str) -> Purpose:
    """The kind of model to build: as named in the configuration, else the first that supports its type."""
    found = [purpose for purpose in PURPOSES if _classes(purpose, config)]
    named = set(getattr(config, "architectures", None) or ())
    for purpose in found:
        if named & {model_class.__name__ for model_class in _classes(purpose, config)}:
            return purpose
    unfit = ("AutoModelForMaskedLM",) if getattr(config, "is_decoder", False) else ()
    # A decoder alone would leave its attention to the encoder idle.
    unfit += ("AutoModelForCausalLM" if getattr(config, "is_encoder_decoder", False) else "AutoModelForSeq2SeqLM",)
    fit = next((purpose for purpose in found if purpose.makes not in unfit), None)
    if fit is None:
        kinds = ", ".join(purpose.makes for purpose in PURPOSES)
        raise NormLabError(f"{name}: no model is made of {type(config).__name__}; expected one that {kinds} knows")
    return fit


def two_segments(ids: torch.Tensor) -> torch.Tensor:
    """0 for the first half of every sequence, 1 for the second."""
    return (torch.arange(ids.shape[-1], device=ids.device) >= ids.shape[-1] // 2).long().expand_as(ids)


def _classes(purpose: Purpose, config: Any) -> tuple[type, ...]:
    found = getattr(hub.library(), purpose.listed).get(type(config), ())
    return found if isinstance(found, tuple) else (found,)


def _told(changes: config_sizes.Changes) -> str:
    return ", ".join(f"{name} {old} -> {new:g}" for name, (old, new) in changes.items())
