"""Model configurations: decoder and encoder, with checks, presets, parameter counts and memory estimates.

Importing this module does not import torch, because the command line shows the fields in its help; making a
configuration does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from normlab.choices import Kernels, Stream, Topology, ValueResidual
from normlab.errors import NormLabError, advice_for, unknown
from normlab.utils.records import hints

if TYPE_CHECKING:
    import torch

    from normlab.models.decoder import Decoder
    from normlab.models.encoder import Encoder
    from normlab.models.estimate import MemoryEstimate
    from normlab.models.transformer import Transformer
    from normlab.schemes.contract.scheme import Scheme

    SchemeLike = Scheme | str
else:
    SchemeLike = str

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"depth": 4, "dim": 128, "heads": 4, "vocab_size": 256, "max_length": 256},
    "125m": {"depth": 12, "dim": 768, "heads": 12, "vocab_size": 50304, "max_length": 1024},
    "350m": {"depth": 24, "dim": 1024, "heads": 16, "vocab_size": 50304, "max_length": 1024},
    "1.3b": {"depth": 24, "dim": 2048, "heads": 16, "vocab_size": 50304, "max_length": 1024},
}

ADDED_LATER = ("value_residual",)
"""Fields that version 0.1 did not have. At its default such a field is not written: stored runs keep their names."""

_CHOICES = {"topology": Topology, "value_residual": ValueResidual, "stream": Stream, "kernels": Kernels}


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Base configuration of all models: blocks of attention and MLP under a scheme."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Named model sizes."""
    sizes: ClassVar[tuple[str, ...]] = ("depth", "dim", "heads")
    """Names of fields that must be at least 1."""

    scheme: SchemeLike = "pre"
    """Normalisation scheme: a name with or without options, peri(step=0.1), or a class in a file of your own,
    highway.py:Highway."""
    depth: int = 4
    """Number of blocks, each of attention and MLP."""
    dim: int = 128
    """Width of the model."""
    heads: int = 4
    """Number of query heads."""
    kv_heads: int | None = None
    """Number of key and value heads, a divisor of heads; None: equal to heads."""
    head_dim: int | None = None
    """Width of a head; None: dim / heads."""
    hidden: int | None = None
    """Width of the MLP, or of one expert; None: 4·dim for gelu, 8/3·dim rounded up to a multiple of 64 for swiglu."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """Type of MLP."""
    bias: bool = False
    """Biases in attention and MLP."""
    value_residual: ValueResidual = "none"
    """Mix the first block's values into those of later blocks: half of each (mean), or as learned."""
    topology: Topology = "serial"
    """Attention and MLP one after the other (serial), or both on the same state (parallel)."""
    experts: int = 0
    """Number of experts that replace every MLP; 0: a dense model."""
    top_k: int = 2
    """Number of experts per token."""
    shared_hidden: int = 0
    """Width of a shared expert that processes every token; 0: none."""
    balance_weight: float = 0.01
    """Weight of the load-balancing loss."""
    router_z_weight: float = 0.0
    """Weight of the router's z-loss."""
    stream: Stream = "auto"
    """Dtype of the residual stream; auto: that of the embedding."""
    kernels: Kernels = "auto"
    """Kernels: fused where they can run (auto), the PyTorch reference, or Triton only."""
    checkpointing: bool = False
    """Activation checkpointing: save only the states between blocks, recompute the rest in the backward pass."""
    init_std: float | None = None
    """Base standard deviation at initialisation; None: the scheme's default."""
    zero_outputs: bool = False
    """Initialise output projections to zero, if the scheme allows it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", self.scheme_object)
        self._check_numbers()
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise unknown(name, getattr(self, name), get_args(choices))
        if self.zero_outputs and not self.scheme_object.zero_outputs:
            raise NormLabError(
                f"{self.scheme_object.name} forbids zero_outputs: it normalises what a branch returns; leave it out"
            )
        self.check()
        # The modules check everything else themselves; building them on the meta device is cheap.
        self._build_one_block()

    def _check_numbers(self) -> None:
        for name, kind in hints(type(self)).items():
            value, kinds = getattr(self, name), get_args(kind) or (kind,)
            missing = value is None and type(None) in kinds
            if int in kinds and not missing and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise NormLabError(f"{name} must be a whole number, got {value!r}; {advice_for(self, name)}")
        for name in self.sizes:
            if getattr(self, name) < 1:
                raise NormLabError(f"{name} must be at least 1, got {getattr(self, name)}; {advice_for(self, name)}")
        for name in ("balance_weight", "router_z_weight"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise NormLabError(
                    f"{name} must be a number from 0 on, got {getattr(self, name)}; {advice_for(self, name)}"
                )
        if self.shared_hidden < 0:
            raise NormLabError(f"shared_hidden must not be negative, got {self.shared_hidden}; 0 is no shared expert")
        if self.shared_hidden and not self.experts:
            raise NormLabError(f"shared_hidden={self.shared_hidden} belongs to experts; set experts, or leave it out")
        if self.init_std is not None and not 0.0 < self.init_std < math.inf:
            raise NormLabError(f"init_std must be positive and finite, got {self.init_std}; leave it out")

    def check(self) -> None:
        """Raise if fields of this type of model do not fit together."""

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """A named model size, with any field changed: `DecoderConfig.preset("125m", scheme="geonorm")`."""
        if name not in cls.presets:
            raise unknown("preset", name, cls.presets)
        return cls(**{**cls.presets[name], **changes})

    def build(self, *, device: torch.device | str | None = None) -> Transformer:
        """Build the model."""
        raise NotImplementedError

    def with_schemes(self, schemes: Sequence[SchemeLike]) -> Sequence[Self]:
        """This configuration with each of several schemes, equal in everything else, for a comparison."""
        return [dataclasses.replace(self, scheme=scheme) for scheme in schemes]

    @property
    def sequence(self) -> int:
        """Longest sequence that the blocks process, in tokens."""
        raise NotImplementedError

    @property
    def answers(self) -> int:
        """Size of the head's output: the vocabulary, or the number of classes."""
        raise NotImplementedError

    @property
    def scheme_object(self) -> Scheme:
        """The scheme as an object; the field `scheme` may be text for type checkers."""
        from normlab.schemes.catalog.registry import scheme

        return scheme(self.scheme)

    @property
    def width_of_head(self) -> int:
        """Width of a head, with the default filled in."""
        return self.head_dim or self.dim // self.heads

    @property
    def width_of_mlp(self) -> int:
        """Width of the MLP or of one expert, with the default filled in."""
        if self.hidden is not None:
            return self.hidden
        return 4 * self.dim if self.mlp == "gelu" else 64 * -(-8 * self.dim // (3 * 64))

    def num_params(self, *, active: bool = False) -> int:
        """Exact number of parameters; with `active`, only those used for one token (mixture of experts)."""
        from normlab.models.estimate import num_params

        return num_params(self, active=active)

    def flops_per_token(self, length: int | None = None) -> int:
        """FLOPs to train on one token of a sequence of `length`: 6 × active parameters + 12 × layers × width × length.

        Parameters that are looked up or added and not multiplied (an untied embedding, positions) do not count. A layer
        used once per sequence (the head of a classifier) counts once.
        """
        from normlab.models.estimate import flops_per_token

        return flops_per_token(self, length or self.sequence)

    def memory(self, batch: int, length: int | None = None, *, precision: str = "bf16") -> MemoryEstimate:
        """Estimated memory of one training step with AdamW, in bytes by purpose."""
        from normlab.models.estimate import training_memory

        return training_memory(self, batch, length or self.sequence, precision)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, the scheme as text; the class accepts them as arguments."""
        fields = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        written = {f.name: v for f, v in fields.items() if not (f.name in ADDED_LATER and v == f.default)}
        return written | {"scheme": str(self.scheme)}

    @property
    def needs_own_head(self) -> bool:
        """Whether the scheme needs an untied head."""
        return any(need.name == "untied-head" for need in self.scheme_object.needs)

    def check_start(self) -> None:
        """Raise if the scheme has a parameter that nothing initialises, before data is read or a folder created."""
        import torch
        from torch import nn

        from normlab.stack import Stack

        nothing = (nn.Identity(), nn.Identity())
        with torch.random.fork_rng(devices=[]):
            Stack(self.scheme_object, [nothing], self.dim, topology=self.topology, residual_only=True).init_()

    def _build_one_block(self) -> None:
        import torch

        from normlab.models.transformer import sublayers

        with torch.device("meta"):
            sublayers(self)


@dataclass(frozen=True, kw_only=True)
class TokenConfig(TransformerConfig):
    """Base configuration of models that read and predict tokens."""

    sizes = (*TransformerConfig.sizes, "vocab_size", "max_length")

    vocab_size: int = 256
    """Vocabulary size."""
    max_length: int = 1024
    """Longest sequence, in tokens."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    tied: bool | None = False
    """Tie the weights of embedding and head. Off by default: if the last state is still close to the embedding,
    a tied head initially predicts the current token.
    None: on, unless the scheme needs an untied head (as in version 0.1)."""

    def check(self) -> None:
        if self.tied and self.needs_own_head:
            raise NormLabError(f"{self.scheme_object.name} needs a head of its own; set tied=False or leave it out")

    def with_schemes(self, schemes: Sequence[SchemeLike]) -> Sequence[Self]:
        """This configuration with each of several schemes; all with untied heads if one scheme needs that."""
        models = super().with_schemes(schemes)
        if len({model.tied_head for model in models}) == 1:
            return models
        return [dataclasses.replace(model, tied=False) for model in models]

    def _build_one_block(self) -> None:
        from normlab.models.rotary import check_rotary

        super()._build_one_block()
        check_rotary(self.width_of_head, self.rope_theta)

    @property
    def tied_head(self) -> bool:
        """Whether the head's weight is tied to the embedding, with the default filled in."""
        return not self.needs_own_head if self.tied is None else self.tied

    @property
    def sequence(self) -> int:
        return self.max_length

    @property
    def answers(self) -> int:
        return self.vocab_size


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(TokenConfig):
    """Configuration of a decoder: `DecoderConfig(scheme="peri(step=0.1)", depth=12, dim=768, heads=12)`."""

    presets: ClassVar = PRESETS

    def build(self, *, device: torch.device | str | None = None) -> Decoder:
        from normlab.models.decoder import Decoder

        return Decoder(self, device=device)


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TokenConfig):
    """Configuration of an encoder: `EncoderConfig(scheme="post", depth=12, dim=768, heads=12)`."""

    # BERT was trained on sequences of 512.
    presets: ClassVar = {
        name: {**PRESETS[name], "max_length": min(512, PRESETS[name]["max_length"])} for name in PRESETS
    }

    def build(self, *, device: torch.device | str | None = None) -> Encoder:
        from normlab.models.encoder import Encoder

        return Encoder(self, device=device)
