"""`Scheme`: a residual-normalisation scheme, the base class of all of them.

A `Scheme` is a frozen record of options. `bind` ties it to a network and returns a `BoundScheme`, the sole owner of the
number of layers, which builds the modules and applies the rules. To write a scheme, subclass `Scheme` and override what
differs from the defaults here; `sublayer` is the only method without one.
"""

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
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.needs import Need
from normlab.schemes.contract.options import check_types, read_angles
from normlab.schemes.contract.parts import Step
from normlab.schemes.contract.site import Site


@dataclass(frozen=True)
class Origin:
    """`where@content:cls`: a file or a module, a hash of its source, and a class in it."""

    where: str
    """Absolute path of the file, or name of the module."""
    content: str | None
    """The hash; None where there is no source to read."""
    cls: str

    @property
    def shared(self) -> Origin:
        """The same without the folder of a file: equal on every machine."""
        return dataclasses.replace(self, where=os.path.basename(self.where))

    def __str__(self) -> str:
        return f"{self.where}@{self.content}:{self.cls}" if self.content else f"{self.where}:{self.cls}"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the hidden state takes the steps that sublayers propose."""

    name: ClassVar[str]
    _origin: ClassVar[Origin | None] = None
    aliases: ClassVar[tuple[str, ...]] = ()
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Names that stand for options of this scheme: `rezero` for LayerScale with a scalar that starts at zero."""
    topologies: ClassVar[tuple[Topology, ...]] = ("serial", "parallel")
    streams: ClassVar[int] = 1
    zero_outputs: ClassVar[bool] = True
    """May output projections start at zero? Not where their output is normalised: the gradient there is 1/√eps."""
    truncate: ClassVar[float | None] = None
    """Cut the initial normal distribution at so many standard deviations."""

    norm: Literal["rms", "layer", "l2", "dyt", "derf", "identity"] = "rms"
    """The norm function that the scheme places."""
    eps: float = 1e-6
    """Epsilon of the norms."""
    gain: norms.Gain = "plain"
    """Norm gains as such, as an offset from one (for training in pure bf16), or none."""
    bias: bool = False
    """Norms with a bias."""
    qk_norm: Literal["none", "head", "flat"] = "none"
    """Norm on queries and keys before rotary: per head (Qwen 3) or over all heads at once (OLMo 2)."""
    cut: int = 1
    """Every step is cut into so many; set by `refine`."""

    # -- what a scheme file says ---------------------------------------------------------------------------------

    def sublayer(self, site: Site) -> Step:
        """The step of one sublayer."""
        raise NotImplementedError

    def block(self, sites: Sequence[Site], topology: Topology) -> Block:
        """The steps of one block, wired. Schemes that span a block override this."""
        kind = SerialBlock if topology == "serial" else ParallelBlock
        return kind([self.sublayer(site) for site in sites])

    def entry(self, bound: BoundScheme) -> nn.Module:
        """From the embedding to the first state."""
        return nn.Identity()

    def exit(self, bound: BoundScheme) -> nn.Module:
        """From the last state to what the head reads."""
        return self.new_norm(bound.dim)

    def hidden(self, state: torch.Tensor) -> torch.Tensor:
        """The (..., D) tensor in a state that a probe or a cache looks at."""
        return state

    @property
    def needs(self) -> tuple[Need, ...]:
        """What must change inside the sublayers."""
        if self.qk_norm == "none":
            return ()
        return (Need("q-norm", self._head_norm("heads")), Need("k-norm", self._head_norm("kv_heads")))

    def base_std(self, dim: int) -> float:
        """Standard deviation of matrices at initialisation, unless the user names another."""
        return 0.02

    def initial_std(self, role: Role, base: float, bound: BoundScheme) -> float:
        """The same for one matrix, given the base."""
        return base

    def decays(self, role: Role) -> bool:
        """Whether weight decay acts on a parameter."""
        return role.is_matrix

    def lr_scale(self, role: Role) -> float:
        """Factor on the learning rate of a parameter."""
        return 1.0

    def constrain_(self, roles: Sequence[Role]) -> None:
        """Re-apply after an optimiser step what the scheme demands of parameters, in place."""

    def sphere(self, dim: int) -> float:
        """Radius of the sphere that the norms project on: √dim for RMSNorm and LayerNorm."""
        norm = self.new_norm(dim, gain="none", bias=False, eps=0.0).double()
        with torch.no_grad():
            return float(torch.linalg.vector_norm(norm(torch.arange(dim, dtype=torch.float64))))

    def law(self, depth: int) -> Law:
        """What theory says. A scheme without a law cannot be simulated and is checked by measurement alone.

        A scheme whose step learns something that changes its law takes `blocks: Sequence[Block] = ()` as well, those of
        a trained network, and reads it from them (`normlab.schemes.contract.learnt`). The gain of the norm that
        attention reads through is no part of a law: it belongs to attention's matrices.
        """
        raise NormLabError(f"{self.name} states no law")

    def check(self) -> None:
        """Raise if the options do not make sense together; types and choices are checked already."""

    # -- what follows from it ------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        read_angles(self)
        check_types(self)
        if self.eps < 0:
            raise NormLabError(f"{self.name}: eps must not be negative, got {self.eps}")
        if self.cut < 1:
            raise NormLabError(f"{self.name}: cut must be at least 1, got {self.cut}")
        self.check()

    @property
    def constrains(self) -> bool:
        """Whether `constrain_` does anything, so that it must be called after every optimiser step."""
        return type(self).constrain_ is not Scheme.constrain_

    def learnt_law(self, blocks: Sequence[Block]) -> Law:
        """The law with what blocks have learnt; the initial one of a scheme whose `law` takes no blocks."""
        law: Callable[..., Law] = self.law
        learns = "blocks" in inspect.signature(law).parameters
        return law(len(blocks), blocks=blocks) if learns else law(len(blocks))

    def bind(
        self, *, depth: int, dim: int, first: int = 0, topology: Topology = "serial", branches: int = 2
    ) -> BoundScheme:
        """The scheme in a network of `depth` blocks of width `dim`; `first`: where this part of the stack begins."""
        return BoundScheme(scheme=self, depth=depth, dim=dim, first=first, topology=topology, branches=branches)

    def refine(self, m: int) -> Scheme:
        """The same scheme with every step cut m times: bind it to m times the depth to cover the same time."""
        return dataclasses.replace(self, cut=self.cut * m)

    def new_norm(self, dim: int, **changes: Any) -> norms.Norm:
        """A norm as the options say."""
        options = {"eps": self.eps, "gain": self.gain, "bias": self.bias} | changes
        return norms.norm(self.norm, dim, **options)

    @classmethod
    def options(cls) -> dict[str, dataclasses.Field]:
        """Every option with its default."""
        return {field.name: field for field in dataclasses.fields(cls)}

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {k: getattr(self, k) for k, field in self.options().items() if getattr(self, k) != field.default}

    @classmethod
    def origin(cls) -> Origin | None:
        """Where the class was found, if by a reference (`highway.py:Highway`); None where its name is enough."""
        return vars(cls).get("_origin")

    @property
    def label(self) -> str:
        """The text that tables show: `peri(step=0.1)`, and `highway(gate=-2)` wherever Highway is from."""
        return self._with_options(self.name)

    @property
    def shared_text(self) -> str:
        """The text that results carry: as `str`, but without the folder of a file."""
        origin = self.origin()
        return self._with_options(self.name if origin is None else str(origin.shared))

    def __str__(self) -> str:
        """The text that `normlab.scheme` reads back: `peri(step=0.1)`, `/home/me/highway.py@3f1c9a02b7de:Highway`."""
        return self._with_options(str(self.origin() or self.name))

    def _with_options(self, name: str) -> str:
        options = ", ".join(f"{k}={v!r}" for k, v in self.changed().items())
        return f"{name}({options})" if options else name

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Another process finds the class of a file by its reference: to pickle, such a file is no module."""
        if self.origin() is None:
            return super().__reduce_ex__(protocol)
        from normlab.schemes.catalog.registry import scheme

        return scheme, (str(self),)

    def _head_norm(self, heads: str):
        def build(attention: Any) -> nn.Module:
            if self.qk_norm == "head":
                return self.new_norm(attention.head_dim)
            return FlatNorm(self.new_norm(getattr(attention, heads) * attention.head_dim))

        return build


class FlatNorm(nn.Module):
    """A norm over all heads at once: (..., heads, head_dim) seen as (..., heads · head_dim)."""

    def __init__(self, norm: norms.Norm):
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(-2)).view_as(x)
