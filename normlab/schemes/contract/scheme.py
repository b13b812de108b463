"""The contract: what a scheme is, and what it becomes once depth and width are known.

A `Scheme` is a frozen record of options. `bind` ties it to a network, and the `BoundScheme`, sole owner of the
number of layers, makes the modules and applies the rules. To write a scheme, subclass `Scheme` and say what differs
from the defaults here; `sublayer` is the only method without one.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn

from normlab import norms
from normlab.choices import Topology
from normlab.errors import NormLabError, unknown
from normlab.roles import FRONT, OUTPUTS, Role
from normlab.schemes.catalog.origin import Origin
from normlab.schemes.contract.angles import angle
from normlab.schemes.contract.blocks import Block, ParallelBlock, SerialBlock
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.needs import Need
from normlab.schemes.contract.parts import Step


@dataclass(frozen=True)
class Site:
    """Where a step stands in the network, in blocks and, for refined schemes, in time."""

    block: int
    branch: int
    depth: int
    dim: int
    steps: int
    """Steps in this block: one per branch, or one for all of them when they run in parallel."""
    cut: int = 1

    @property
    def dt(self) -> float:
        """The share of a whole step that is taken here: one unless the scheme was refined."""
        return 1.0 / self.cut

    @property
    def time(self) -> float:
        """Depth in whole blocks before this one; the k of the equations, counted from zero."""
        return self.block / self.cut

    @property
    def horizon(self) -> float:
        """Depth of the whole network in whole blocks; the L of the equations."""
        return self.depth / self.cut

    @property
    def sublayers(self) -> float:
        """Steps in the whole network; the 2L of the equations."""
        return self.steps * self.horizon


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
        _read_angles(self)
        _check_types(self)
        if self.eps < 0:
            raise NormLabError(f"{self.name}: eps must not be negative, got {self.eps}")
        if self.cut < 1:
            raise NormLabError(f"{self.name}: cut must be at least 1, got {self.cut}")
        self.check()

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


@dataclass(frozen=True)
class BoundScheme:
    """A scheme in a network of known depth and width: makes its modules, applies its rules."""

    scheme: Scheme
    depth: int
    dim: int
    first: int
    topology: Topology
    branches: int

    def __post_init__(self) -> None:
        who = self.scheme.name
        if self.depth < 1 or self.dim < 1 or self.branches < 1:
            raise NormLabError(
                f"{who}: depth, dim and branches must be at least 1, got {self.depth}, {self.dim}, {self.branches}"
            )
        if not 0 <= self.first < self.depth:
            raise NormLabError(f"{who}: first must lie in [0, {self.depth}), got {self.first}")
        if self.topology not in get_args(Topology):
            raise unknown("topology", self.topology, get_args(Topology))
        if self.topology not in self.scheme.topologies:
            raise NormLabError(f"{who} has no {self.topology} form; use topology='serial' or another scheme, e.g. pre")

    @property
    def horizon(self) -> float:
        """Depth in whole blocks; differs from `depth` only for refined schemes."""
        return self.depth / self.scheme.cut

    @property
    def steps(self) -> int:
        """Steps in a block: one per branch, or one for all of them when they run in parallel."""
        return self.branches if self.topology == "serial" else 1

    @property
    def sublayers(self) -> float:
        """Steps in the whole network; the 2L of the depth constants."""
        return self.steps * self.horizon

    @property
    def updates(self) -> float:
        """Updates that the state takes in on its way: the 2L of the initialisation rules."""
        return self.branches * self.horizon

    @property
    def constrains(self) -> bool:
        """Whether anything has to be done after an optimiser step."""
        return type(self.scheme).constrain_ is not Scheme.constrain_

    def entry(self) -> nn.Module:
        return self.scheme.entry(self)

    def exit(self) -> nn.Module:
        return self.scheme.exit(self)

    def block(self, k: int) -> Block:
        """Block k of this part of the stack; its place in the whole network is first + k."""
        return self.scheme.block(self._sites(k), self.topology)

    def _sites(self, k: int) -> list[Site]:
        if not 0 <= k < self.depth - self.first:
            raise NormLabError(
                f"{self.scheme.name}: block {k} is out of range; "
                f"this part has blocks 0 to {self.depth - self.first - 1} (depth {self.depth}, first {self.first})"
            )
        place = (self.depth, self.dim, self.steps, self.scheme.cut)
        return [Site(self.first + k, i, *place) for i in range(self.branches)]

    def hidden(self, state: torch.Tensor) -> torch.Tensor:
        return self.scheme.hidden(state)

    def law(self) -> Law:
        return self.scheme.law(math.ceil(self.horizon))

    def init_(
        self,
        roles: Sequence[Role],
        *,
        std: float | None = None,
        zero_outputs: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        """Initialise matrices by role and set biases to zero; then apply the after-step constraint once."""
        if zero_outputs and not self.scheme.zero_outputs:
            raise NormLabError(
                f"{self.scheme.name} normalises what a branch returns, so output projections must not start at zero; "
                f"leave zero_outputs off"
            )
        base = self.scheme.base_std(self.dim) if std is None else std
        for role in roles:
            if role.role == "bias":
                nn.init.zeros_(role.parameter)
            elif role.is_matrix:
                zero = zero_outputs and role.role in OUTPUTS
                self._normal_(role, 0.0 if zero else self.initial_std(role, base), generator)
        self.after_step(roles)

    def initial_std(self, role: Role, base: float) -> float:
        """Standard deviation of a matrix at initialisation: the scheme's, but for what stands in front of the stack."""
        # Unit patches at unit places, whatever the scheme: from small ones the first block alone would set the state,
        # and without a causal mask it says the same to every token. Small places drown in the patches.
        return 1.0 if role.role in FRONT else self.scheme.initial_std(role, base, self)

    def _normal_(self, role: Role, std: float, generator: torch.Generator | None) -> None:
        cut = self.scheme.truncate
        with role.edit() as weight:
            if std == 0.0:
                weight.zero_()
            elif cut is None:
                weight.normal_(0.0, std, generator=generator)
            else:
                nn.init.trunc_normal_(weight, 0.0, std, -cut * std, cut * std, generator=generator)

    def param_groups(self, roles: Sequence[Role], *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Optimiser groups in which every parameter stands exactly once."""
        rules: dict[int, tuple[nn.Parameter, bool, float]] = {}
        for role in roles:
            rule = (role.parameter, self.scheme.decays(role), self.scheme.lr_scale(role))
            known = rules.setdefault(id(role.parameter), rule)
            if known[1:] != rule[1:]:
                raise NormLabError(f"{role.name}: parts of one parameter ask for different optimiser rules; split it")
        groups: dict[tuple[bool, float], dict[str, Any]] = {}
        for parameter, decay, scale in rules.values():
            empty = {
                "name": ("decay" if decay else "no-decay") + ("" if scale == 1.0 else f" lr×{scale:g}"),
                "params": [],
                "lr": lr * scale,
                "weight_decay": weight_decay if decay else 0.0,
            }
            groups.setdefault((decay, scale), empty)["params"].append(parameter)
        return list(groups.values())

    @torch.no_grad()
    def after_step(self, roles: Sequence[Role]) -> None:
        """Re-apply the scheme's constraint; call it after every optimiser step."""
        self.scheme.constrain_(roles)


class FlatNorm(nn.Module):
    """A norm over all heads at once: (..., heads, head_dim) seen as (..., heads · head_dim)."""

    def __init__(self, norm: norms.Norm):
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(-2)).view_as(x)


def _read_angles(scheme: Scheme) -> None:
    """Numbers that were given as text, "pi/8", are kept as numbers: one scheme has one text and one hash."""
    hints = get_type_hints(type(scheme))
    for name in scheme.options():
        value = getattr(scheme, name)
        turn = angle(value) if hints[name] is float and isinstance(value, str) else None
        if turn is not None:
            object.__setattr__(scheme, name, turn)


def _check_types(scheme: Scheme) -> None:
    hints = get_type_hints(type(scheme))
    for name in scheme.options():
        value, hint = getattr(scheme, name), hints[name]
        if get_origin(hint) is Literal and value not in get_args(hint):
            choices = ", ".join(map(repr, get_args(hint)))
            raise NormLabError(f"{scheme.name}: {name} must be one of {choices}, got {value!r}")
        if hint is float and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise NormLabError(f"{scheme.name}: {name} must be a number (angles may be written pi/8), got {value!r}")
        if hint in (bool, int) and type(value) is not hint:
            raise NormLabError(f"{scheme.name}: {name} must be of type {hint.__name__}, got {value!r}")
