"""`Scheme`: a residual-normalisation scheme, the base class of all of them.

A `Scheme` is a frozen record of options. `bind` ties it to a network and returns a `BoundScheme`, the sole owner of the
number of layers, which builds the modules and applies the rules. To write a scheme, subclass `Scheme` and override what
differs from the defaults here; `sublayer` is the only method without one.
"""

# torch annotates some tensor functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from normlab import norms
from normlab.choices import Topology
from normlab.errors import NormLabError
from normlab.roles import Role
from normlab.schemes.contract.blocks import Block, ParallelBlock, SerialBlock
from normlab.schemes.contract.bound_scheme import BoundScheme, usual_kinds
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.needs import Need
from normlab.schemes.contract.options import check_types, read_angles
from normlab.schemes.contract.parts import Step
from normlab.schemes.contract.site import Kind, Site


@dataclass(frozen=True)
class Origin:
    """Where a scheme class was imported from, if not found by its name: `where@content:cls`."""

    where: str
    """Absolute path of the file, or name of the module."""
    content: str | None
    """Hash of the source; None if there is no source to read."""
    cls: str
    """Name of the class."""

    @property
    def shared(self) -> Origin:
        """The same without the folder of a file, so that it is equal on every machine."""
        return dataclasses.replace(self, where=os.path.basename(self.where))

    def __str__(self) -> str:
        return f"{self.where}@{self.content}:{self.cls}" if self.content else f"{self.where}:{self.cls}"


DepthTransfer = Literal["derived", "hypothesis"]
"""Whether a rule that carries a learning rate over depth follows from a scheme's equations, or is assumed."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Base class of residual-normalisation schemes: how the outputs of sublayers update the hidden state.

    The dataclass fields are the options that all schemes share; a subclass adds its own.
    """

    name: ClassVar[str]
    """The name that users type."""
    _origin: ClassVar[Origin | None] = None
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names for the same scheme."""
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Names for certain options of this scheme: `rezero` for LayerScale with a scalar that starts at zero."""
    topologies: ClassVar[tuple[Topology, ...]] = ("serial", "parallel")
    """Block topologies that the scheme supports."""
    zero_outputs: ClassVar[bool] = True
    """Whether output projections may start at zero. Not if their output is normalised: the gradient there is 1/√eps."""
    truncate: ClassVar[float | None] = None
    """Truncate the initial normal distribution at this many standard deviations; None: not truncated."""
    depth_transfer: ClassVar[DepthTransfer] = "hypothesis"
    """Whether the rule of `at_depth` is derived from the scheme's equations, or a hypothesis."""
    depth_rule: ClassVar[str] = "no constant is changed; that a learning rate holds at every depth is assumed"
    """The rule of `at_depth` in one line; L₀ is the base depth."""

    norm: Literal["rms", "layer", "l2", "dyt", "derf", "identity"] = "rms"
    """The norm function."""
    eps: float = 1e-6
    """Epsilon of the norms."""
    gain: norms.Gain = "plain"
    """Gains of the norms: plain, stored as an offset from 1 (for training in pure bf16), or none."""
    bias: bool = False
    """Give the norms a bias."""
    qk_norm: Literal["none", "head", "flat"] = "none"
    """Norm on queries and keys before rotary embeddings: per head (Qwen 3) or over all heads at once (OLMo 2)."""
    cut: float = 1
    """Divide every step by this number; set by `refine` and `at_depth`."""

    # -- what a subclass defines ---------------------------------------------------------------------------------

    def sublayer(self, site: Site) -> Step:
        """A new residual step for one sublayer; the only method that every scheme must define."""
        raise NotImplementedError

    def block(self, sites: Sequence[Site], topology: Topology) -> Block:
        """A new block made of the sublayers' steps. Schemes whose skip connection spans a block override this."""
        kind = SerialBlock if topology == "serial" else ParallelBlock
        return kind([self.sublayer(site) for site in sites])

    def entry(self, bound: BoundScheme) -> nn.Module:
        """A new module that turns the embedding into the first state."""
        return nn.Identity()

    def exit(self, bound: BoundScheme) -> nn.Module:
        """A new module that turns the last state into the head's input."""
        return self.new_norm(bound.dim)

    def hidden(self, state: torch.Tensor) -> torch.Tensor:
        """The (..., D) hidden state in a state of the scheme, as a probe measures it."""
        return state

    @property
    def streams(self) -> int:
        """Residual streams in a state: (..., D) for one, (..., streams, D) for more. An option in some schemes."""
        return 1

    @property
    def needs(self) -> tuple[Need, ...]:
        """Modules that the scheme places inside sublayers and head."""
        if self.qk_norm == "none":
            return ()
        return (Need("q-norm", self._head_norm("heads")), Need("k-norm", self._head_norm("kv_heads")))

    def base_std(self, dim: int) -> float:
        """Base standard deviation of matrices at initialisation, unless the user sets one."""
        return 0.02

    def initial_std(self, role: Role, base: float, bound: BoundScheme) -> float:
        """Initial standard deviation of one matrix, given the base."""
        return base

    def decays(self, role: Role) -> bool:
        """Whether a parameter has weight decay."""
        return role.is_matrix

    def weight_decay(self, role: Role, base: float) -> float:
        """Weight decay of a parameter, given that of the matrices: all of it where `decays` says so, else none."""
        return base if self.decays(role) else 0.0

    def lr_scale(self, role: Role) -> float:
        """Multiplier on the learning rate of a parameter."""
        return 1.0

    def constrain_(self, roles: Sequence[Role]) -> None:
        """Apply the scheme's constraint to the parameters in place, after an optimiser step."""

    def sphere(self, dim: int) -> float:
        """Radius of the sphere that the norms project on: √dim for RMSNorm and LayerNorm."""
        norm = self.new_norm(dim, gain="none", bias=False, eps=0.0).double()
        with torch.no_grad():
            return float(torch.linalg.vector_norm(norm(torch.arange(dim, dtype=torch.float64))))

    def law(self, depth: int) -> Law:
        """The theoretical law of the scheme. A scheme without one cannot be simulated, only measured.

        A scheme with learned parameters that change its law takes a second argument, `blocks: Sequence[Block] = ()`,
        the blocks of a trained network, and reads the parameters from them (`normlab.schemes.contract.learnt`). The
        gain of the norm before attention is not part of a law: it is equivalent to a change of attention's matrices.
        """
        raise NormLabError(f"{self.name} states no law")

    def check(self) -> None:
        """Raise if options do not fit together; types and choices have been checked before."""

    # -- what follows from the above -----------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        read_angles(self)
        check_types(self)
        if self.eps < 0:
            raise NormLabError(f"{self.name}: eps must not be negative, got {self.eps}")
        if self.cut <= 0.0:
            raise NormLabError(f"{self.name}: cut must be positive, got {self.cut}; leave it out")
        self.check()

    @property
    def constrains(self) -> bool:
        """Whether `constrain_` does anything, so that it must be called after every optimiser step."""
        return type(self).constrain_ is not Scheme.constrain_

    def learnt_law(self, blocks: Sequence[Block]) -> Law:
        """The law with the learned parameters of blocks; the initial law if `law` takes no blocks."""
        law: Callable[..., Law] = self.law
        learns = "blocks" in inspect.signature(law).parameters
        return law(len(blocks), blocks=blocks) if learns else law(len(blocks))

    def bind(
        self,
        *,
        depth: int,
        dim: int,
        first: int = 0,
        topology: Topology = "serial",
        branches: int | Sequence[Sequence[Kind]] = 2,
    ) -> BoundScheme:
        """Bind the scheme to a network of `depth` blocks of width `dim`.

        `first` is the index of the first block of this part of the network (pipeline stages); `branches` the number of
        sublayers in a block or, where blocks differ, what each sublayer of each block is.
        """
        same = isinstance(branches, int)
        kinds = (usual_kinds(branches),) * depth if same else tuple(tuple(block) for block in branches)
        return BoundScheme(scheme=self, depth=depth, dim=dim, first=first, topology=topology, kinds=kinds)

    def refine(self, m: float) -> Scheme:
        """The same scheme with every step divided by m: bound to m times the depth it covers the same time."""
        cut = self.cut * m
        return dataclasses.replace(self, cut=int(cut) if cut == int(cut) else cut)

    def at_depth(self, base: int, depth: int) -> Scheme:
        """The scheme for `depth` blocks, such that a learning rate tuned with `base` blocks holds (`depth_rule`).

        A derived rule divides every step by depth / base and keeps the initialisation of the base depth (CompleteP,
        arXiv 2505.01618). Schemes without one are returned as they are, with their own constants for the depth.
        """
        return self.refine(depth / base) if self.depth_transfer == "derived" and depth != base else self

    def new_norm(self, dim: int, **changes: Any) -> norms.Norm:
        """A new norm according to the scheme's options; `changes` override some of them."""
        options: dict[str, Any] = {"eps": self.eps, "gain": self.gain, "bias": self.bias} | changes
        return norms.norm(self.norm, dim, **options)

    @classmethod
    def options(cls) -> dict[str, dataclasses.Field[Any]]:
        """The dataclass field of every option, by name."""
        return {field.name: field for field in dataclasses.fields(cls)}

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {k: getattr(self, k) for k, field in self.options().items() if getattr(self, k) != field.default}

    @classmethod
    def origin(cls) -> Origin | None:
        """Where the class was imported from, if by a reference (`highway.py:Highway`); None if found by its name."""
        return vars(cls).get("_origin")

    @property
    def label(self) -> str:
        """Short text for tables: `peri(step=0.1)`; for a class from a file also its name alone, `highway(gate=-2)`."""
        return self._with_options(self.name)

    @property
    def shared_text(self) -> str:
        """Text for shared results: as `str`, but without the folder of a file."""
        origin = self.origin()
        return self._with_options(self.name if origin is None else str(origin.shared))

    def __str__(self) -> str:
        """Text that `normlab.scheme` parses: `peri(step=0.1)`, `/home/me/highway.py@3f1c9a02b7de:Highway`."""
        return self._with_options(str(self.origin() or self.name))

    def _with_options(self, name: str) -> str:
        options = ", ".join(f"{k}={v!r}" for k, v in self.changed().items())
        return f"{name}({options})" if options else name

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a scheme from a file by its reference, because its class is in no importable module."""
        if self.origin() is None:
            return super().__reduce_ex__(protocol)
        from normlab.schemes.catalog.registry import scheme

        return scheme, (str(self),)

    def _head_norm(self, heads: str) -> Callable[[Any], nn.Module]:
        def build(attention: Any) -> nn.Module:
            if self.qk_norm == "head":
                return self.new_norm(attention.head_dim)
            return FlatNorm(self.new_norm(getattr(attention, heads) * attention.head_dim))

        return build


class FlatNorm(nn.Module):
    """A norm over all heads at once: (..., heads, head_dim) is treated as (..., heads · head_dim)."""

    def __init__(self, norm: norms.Norm):
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(-2)).view_as(x)
