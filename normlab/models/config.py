"""What a model is made of, checked when it is written down; sizes, work and memory before anything is built.

Importing this does not import torch: the command line shows these fields in its help. Making a configuration does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from normlab.choices import Kernels, Stream, Topology
from normlab.errors import NormLabError, unknown

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


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What all models have: blocks of attention and MLP under a scheme."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Named sizes."""
    sizes: ClassVar[tuple[str, ...]] = ("depth", "dim", "heads")
    """Fields that are at least one."""

    scheme: SchemeLike = "pre"
    """How the layers are normalised: a scheme or its name, with or without options; one of your own by its file,
    highway.py:Highway. Kept as the scheme it names."""
    depth: int = 4
    """Blocks, each of attention and MLP."""
    dim: int = 128
    """Width of the model."""
    heads: int = 4
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads, a divisor of heads; None: as many as heads."""
    head_dim: int | None = None
    """Width of a head; None: dim / heads."""
    hidden: int | None = None
    """Width of the MLP, or of one expert; None: 4·dim for gelu, 8/3·dim rounded up to a multiple of 64 for swiglu."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """Kind of MLP."""
    bias: bool = False
    """Biases in attention and MLP."""
    topology: Topology = "serial"
    """Attention and MLP one after the other, or at the same state."""
    experts: int = 0
    """Experts in place of every MLP; 0: a dense model."""
    top_k: int = 2
    """Experts that a token is sent to."""
    shared_hidden: int = 0
    """Width of an expert that sees every token; 0: none."""
    balance_weight: float = 0.01
    """Weight of the load-balancing loss."""
    router_z_weight: float = 0.0
    """Weight of the router's z-loss."""
    stream: Stream = "auto"
    """Number format of the residual stream; auto: that of the embedding."""
    kernels: Kernels = "auto"
    """Fused kernels where they can run, the plain reference, or Triton and nothing else."""
    checkpointing: bool = False
    """Keep only the states between blocks and compute the rest again in the backward pass."""
    init_std: float | None = None
    """Base standard deviation at initialisation; None: the scheme's own."""
    zero_outputs: bool = False
    """Start output projections at zero, where the scheme allows it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", self.scheme_object)
        for name in self.sizes:
            if getattr(self, name) < 1:
                raise NormLabError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.stream not in get_args(Stream):
            raise unknown("stream", self.stream, get_args(Stream))
        if self.kernels not in get_args(Kernels):
            raise unknown("kernels", self.kernels, get_args(Kernels))
        if self.zero_outputs and not self.scheme_object.zero_outputs:
            raise NormLabError(f"{self.scheme_object.name} forbids zero_outputs: it normalises what a branch returns")
        self.check()
        # Everything else is checked by the parts themselves; on the meta device building them costs nothing.
        self._build_one_block()

    def check(self) -> None:
        """Raise where fields of one kind of model do not make sense together."""

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """A named size, with any field changed: `DecoderConfig.preset("125m", scheme="geonorm")`."""
        if name not in cls.presets:
            raise unknown("preset", name, cls.presets)
        return cls(**{**cls.presets[name], **changes})

    def build(self, *, device: torch.device | str | None = None) -> Transformer:
        """The model itself."""
        raise NotImplementedError

    def with_schemes(self, schemes: Sequence[SchemeLike]) -> Sequence[Self]:
        """This configuration under each of several schemes, equal in everything else: models to be compared."""
        return [dataclasses.replace(self, scheme=scheme) for scheme in schemes]

    @property
    def sequence(self) -> int:
        """Tokens of the longest sequence that the blocks see."""
        raise NotImplementedError

    @property
    def answers(self) -> int:
        """Numbers that the head returns: tokens of the vocabulary, or classes."""
        raise NotImplementedError

    @property
    def scheme_object(self) -> Scheme:
        """The scheme, for type checkers: `scheme` takes text as well."""
        from normlab.schemes.catalog.registry import scheme

        return scheme(self.scheme)

    @property
    def width_of_head(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def width_of_mlp(self) -> int:
        if self.hidden is not None:
            return self.hidden
        return 4 * self.dim if self.mlp == "gelu" else 64 * -(-8 * self.dim // (3 * 64))

    def num_params(self, *, active: bool = False) -> int:
        """Exact number of parameters; `active`: only those that work on one token."""
        from normlab.models.estimate import num_params

        return num_params(self, active=active)

    def flops_per_token(self, length: int | None = None) -> int:
        """FLOPs to train on one token of a sequence of `length`: 6 × active parameters + 12 × layers × width × length.

        What is looked up or added and not multiplied (an embedding that no head shares, positions) does not count, and
        what works once a sequence (the head of a classifier) counts once.
        """
        from normlab.models.estimate import flops_per_token

        return flops_per_token(self, length or self.sequence)

    def memory(self, batch: int, length: int | None = None, *, precision: str = "bf16") -> MemoryEstimate:
        """Memory for one training step with AdamW, in bytes by what it is spent on."""
        from normlab.models.estimate import training_memory

        return training_memory(self, batch, length or self.sequence, precision)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the scheme as its text; the class reads them back as arguments."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"scheme": str(self.scheme)}

    @property
    def needs_own_head(self) -> bool:
        """Whether the scheme cannot share the head's matrix with the embedding."""
        return any(need.name == "untied-head" for need in self.scheme_object.needs)

    def check_start(self) -> None:
        """Raise, before data is read or a folder made, where the scheme has a parameter that nothing initialises."""
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
    """A model that reads tokens and predicts tokens."""

    sizes = (*TransformerConfig.sizes, "vocab_size", "max_length")

    vocab_size: int = 256
    """Tokens in the vocabulary."""
    max_length: int = 1024
    """Longest sequence."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    tied: bool | None = False
    """Share one matrix between embedding and head. Off: where the last state still is the embedding, a tied head starts
    by predicting the token just read. None: on, unless the scheme needs a head of its own (version 0.1's default)."""

    def check(self) -> None:
        if self.tied and self.needs_own_head:
            raise NormLabError(f"{self.scheme_object.name} needs a head of its own; set tied=False or leave it out")

    def with_schemes(self, schemes: Sequence[SchemeLike]) -> Sequence[Self]:
        """This configuration under each of several schemes; all with heads of their own where one scheme needs that."""
        models = super().with_schemes(schemes)
        if len({model.tied_head for model in models}) == 1:
            return models
        return [dataclasses.replace(model, tied=False) for model in models]

    @property
    def tied_head(self) -> bool:
        return not self.needs_own_head if self.tied is None else self.tied

    @property
    def sequence(self) -> int:
        return self.max_length

    @property
    def answers(self) -> int:
        return self.vocab_size


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(TokenConfig):
    """A decoder: `DecoderConfig(scheme="peri(step=0.1)", depth=12, dim=768, heads=12)`."""

    presets: ClassVar = PRESETS

    def build(self, *, device: torch.device | str | None = None) -> Decoder:
        from normlab.models.decoder import Decoder

        return Decoder(self, device=device)


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TokenConfig):
    """An encoder: `EncoderConfig(scheme="post", depth=12, dim=768, heads=12)`."""

    # BERT was trained on sequences of 512.
    presets: ClassVar = {
        name: {**PRESETS[name], "max_length": min(512, PRESETS[name]["max_length"])} for name in PRESETS
    }

    def build(self, *, device: torch.device | str | None = None) -> Encoder:
        from normlab.models.encoder import Encoder

        return Encoder(self, device=device)
