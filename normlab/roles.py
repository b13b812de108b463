"""Parameter roles: the function of each parameter in a Transformer, for initialisation, weight decay and constraints.

The role of a matrix is one of `q k v o gate up down embed head router`, `patch position` for images, `mix` for a matrix
that computes coefficients of a scheme's residual step from the stream (mixing of streams, gates), and `spread` for one
that computes a coefficient for every channel of the stream from a few numbers; a parameter with one dimension or none
is a `bias` or a `vector` (gains, scales). A matrix whose role is unknown raises an error.
"""

# torch annotates `named_modules` and some tensor functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from normlab.errors import NormLabError

READERS = ("q", "k", "v", "gate", "up", "head", "router", "mix")
"""Roles of matrices that read from the residual stream: the model dimension is their input axis."""

WRITERS = ("o", "down", "embed", "patch", "position", "spread")
"""Roles of matrices that write to the residual stream: the model dimension is their output axis."""

OUTPUTS = ("o", "down")
"""Roles of output projections, the last matrix of a sublayer: depth-scaled and zero initialisation apply to these."""

FRONT = ("patch", "position")
"""Roles of image embeddings: the patch projection, and position embeddings with that of the class token."""

COEFFICIENTS = ("mix", "spread")
"""Roles of matrices that a scheme adds to compute the coefficients of its residual steps."""

MATRICES = READERS + WRITERS
VECTORS = ("bias", "vector")


class Part(NamedTuple):
    """The role of a slice of a parameter, and its input axis."""

    role: str
    start: int = 0
    length: int | None = None
    """The slice [start, start + length) of the output axis; None: to the end. A fused QKV matrix has three parts."""
    input_axis: int = -1
    """-1 for `nn.Linear` (out, in); -2 for GPT-2's transposed layers and for embeddings, which are indexed by row."""


Spec = str | Part | Sequence[Part]
"""The role of one parameter as users and modules state it: a name, a part, or several parts."""


@runtime_checkable
class KnowsItsRoles(Protocol):
    """A module that states the roles of its parameters."""

    def parameter_roles(self) -> Mapping[str, Spec]:
        """Roles by dotted parameter name."""
        ...


@dataclass(frozen=True, eq=False)
class Role:
    """The role of one parameter, or of a slice of it."""

    name: str
    parameter: nn.Parameter
    role: str
    start: int = 0
    length: int | None = None
    input_axis: int = -1

    @property
    def output_axis(self) -> int:
        """The axis along the outputs: -2 or -1."""
        # Of the last two axes; leading ones (stacked experts) are a batch.
        return -2 if self.input_axis == -1 else -1

    @property
    def model_axis(self) -> int:
        """The axis along the model dimension."""
        return self.output_axis if self.role in WRITERS else self.input_axis

    @property
    def is_matrix(self) -> bool:
        """Whether this is a matrix and not a bias or vector."""
        return self.role in MATRICES

    def view(self) -> torch.Tensor:
        """The slice as a tensor that shares memory with the parameter."""
        if _is_sharded(self.parameter) and not self.is_whole:
            raise NormLabError(f"{self.name}: a part of a sharded parameter has no view; write to it through edit()")
        return self._cut(self.parameter.detach())

    @contextmanager
    def edit(self) -> Generator[torch.Tensor, None, None]:
        """Context manager that yields the slice as a plain tensor to write to, also for sharded parameters (FSDP2).

        A sharded parameter is gathered and distributed again with the values of rank 0: for initialisation, not for
        every step.
        """
        if not _is_sharded(self.parameter):
            yield self.view()
            return
        from torch.distributed.tensor import distribute_tensor

        parameter: Any = self.parameter.detach()
        whole = parameter.full_tensor()
        yield self._cut(whole)
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))

    @property
    def is_whole(self) -> bool:
        """Whether the slice is the whole parameter."""
        return self.start == 0 and (self.length is None or self.length == self.parameter.shape[self.output_axis])

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.is_whole else tensor.narrow(self.output_axis, self.start, self._length)

    @property
    def _length(self) -> int:
        return self.parameter.shape[self.output_axis] - self.start if self.length is None else self.length

    @property
    def fans(self) -> tuple[int, int]:
        """(fan in, fan out) of this slice, so that a fused matrix is initialised like separate ones."""
        return self.parameter.shape[self.input_axis], self._length


def drawing_order(roles: Sequence[Role]) -> list[Role]:
    """Roles with a scheme's own matrices last: sublayers then start alike under every scheme, for the same seed."""
    return sorted(roles, key=lambda role: role.role in COEFFICIENTS)


def whole_parameters(roles: Sequence[Role]) -> list[Role]:
    """Merge the parts of each parameter into one role if they have the same model axis.

    An operation along that axis alone can then be applied to the whole parameter, which also works on shards.
    """
    by_parameter: dict[int, list[Role]] = {}
    for role in roles:
        by_parameter.setdefault(id(role.parameter), []).append(role)
    joined: list[Role] = []
    for parts in by_parameter.values():
        agree = len({part.model_axis for part in parts}) == 1
        joined += [dataclasses.replace(parts[0], start=0, length=None)] if agree else parts
    return joined


def _is_sharded(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "full_tensor")


# Parameter names in common public code bases. Fused matrices with parts of equal length are listed separately, with the
# order of their parts. Fused QKV matrices with grouped queries have unequal parts; their module or the user must say
# so.
_KNOWN: Sequence[tuple[str, str]] = (
    (r"(q_proj|wq|to_q|query|q_lin|q)", "q"),
    (r"(k_proj|wk|to_k|key|k_lin|k)", "k"),
    (r"(v_proj|wv|to_v|value|v_lin|v)", "v"),
    (r"(o_proj|out_proj|wo|to_out|out_lin|o|to_out\.0)", "o"),
    (r"(attn\.c_proj|self_attn\.dense|(self_)?attention\.dense|attention\.output\.dense)", "o"),
    (r"(gate_proj|w1)", "gate"),
    (r"(up_proj|w3|fc1|fc_in|c_fc|dense_h_to_4h|lin1|intermediate\.dense|linear1|up)", "up"),
    (r"(down_proj|w2|fc2|fc_out|mlp\.c_proj|dense_4h_to_h|lin2|output\.dense|linear2|down)", "down"),
    (
        r"(embed_tokens|wte|wpe|embed_in|word_embeddings|position_embeddings|token_type_embeddings|tok_embeddings)",
        "embed",
    ),
    (r"(lm_head|embed_out|head)", "head"),
    (r"(router|mlp\.gate|block_sparse_moe\.gate)", "router"),
)
_FUSED: Sequence[tuple[str, tuple[str, ...]]] = (
    (r"(c_attn|qkv|Wqkv|qkv_proj|in_proj|to_qkv)", ("q", "k", "v")),
    (r"(gate_up_proj|gate_up)", ("gate", "up")),
)


def find_roles(
    module: nn.Module,
    given: Mapping[str, Spec] | None = None,
    prefix: str = "",
    *,
    otherwise: Callable[[str, nn.Parameter], Spec | None] = lambda name, parameter: None,
) -> list[Role]:
    """Find the roles of all parameters of `module`.

    `given` maps name patterns (`"*.mlp.0.weight"`) to roles. It takes precedence over `parameter_roles()` of modules,
    then well-known names, then `otherwise`. Matrices without a role raise one error that lists them.
    """
    stated = dict(_stated_by_modules(module))
    roles: list[Role] = []
    nameless: list[str] = []
    for name, parameter in module.named_parameters():
        spec = _from_patterns(name, given or {}) or stated.get(name) or _from_name(name, parameter, module)
        spec = spec or otherwise(name, parameter)
        if spec is None:
            nameless.append(f"{prefix}{name} {tuple(parameter.shape)}")
        else:
            roles += _expand(prefix + name, parameter, spec)
    if nameless:
        raise NormLabError(
            f"no role for {'; '.join(nameless)}: expected one of {', '.join(MATRICES)}; "
            f"pass roles={{'*pattern*': 'up', ...}} or give the module a parameter_roles() method"
        )
    return roles


def _stated_by_modules(module: nn.Module) -> Iterator[tuple[str, Spec]]:
    for path, child in module.named_modules():
        if isinstance(child, KnowsItsRoles):
            for name, spec in child.parameter_roles().items():
                yield (f"{path}.{name}" if path else name), spec


def _from_patterns(name: str, given: Mapping[str, Spec]) -> Spec | None:
    return next((spec for pattern, spec in given.items() if fnmatch.fnmatch(name, pattern)), None)


def _from_name(name: str, parameter: nn.Parameter, root: nn.Module) -> Spec | None:
    if name.rpartition(".")[2].endswith("bias"):
        return "bias"
    if parameter.ndim < 2:
        return "vector"
    path = re.sub(r"[._]weight$", "", name)
    owner = root.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.Embedding):
        return Part("embed", input_axis=-2)
    input_axis = -2 if type(owner).__name__ == "Conv1D" else -1
    for pattern, parts in _FUSED:
        if re.search(rf"(^|\.){pattern}$", path):
            return _equal_parts(parameter, parts, input_axis)
    for pattern, role in _KNOWN:
        if re.search(rf"(^|\.){pattern}$", path):
            return Part(role, input_axis=input_axis)
    return None


def _equal_parts(parameter: nn.Parameter, roles: Sequence[str], input_axis: int) -> list[Part] | None:
    rows = parameter.shape[-2 if input_axis == -1 else -1]
    model = parameter.shape[input_axis]
    # Three equal squares are certainly Q, K, V; for anything else (grouped queries) the module or the user must say.
    if rows % len(roles) or (len(roles) == 3 and rows != 3 * model):
        return None
    each = rows // len(roles)
    return [Part(role, i * each, each, input_axis) for i, role in enumerate(roles)]


def _expand(name: str, parameter: nn.Parameter, spec: Spec) -> list[Role]:
    parts = [Part(spec)] if isinstance(spec, str) else [spec] if isinstance(spec, Part) else list(spec)
    for part in parts:
        if part.role not in MATRICES + VECTORS:
            raise NormLabError(f"{name}: unknown role {part.role!r}; expected one of {', '.join(MATRICES + VECTORS)}")
        # By its name: FSDP1 and others flatten matrices, too.
        if part.role in MATRICES and parameter.ndim < 2 and name.endswith("bias"):
            raise NormLabError(
                f"{name}: {part.role!r} is the role of a matrix; expected 'bias'; try a pattern that ends in 'weight'"
            )
    roles = [Role(name, parameter, *part) for part in parts]
    if parameter.ndim >= 2:
        _check_cover(name, parameter, roles)
    return roles


def _check_cover(name: str, parameter: nn.Parameter, roles: Sequence[Role]) -> None:
    """Refuse parts that leave rows out, overlap, or reach beyond the parameter."""
    end, size = 0, parameter.shape[roles[0].output_axis]
    for role in sorted(roles, key=lambda role: role.start):
        if role.start != end:
            break
        end += role.fans[1]
    if end != size:
        found = ", ".join(f"{role.role} {role.start}:{role.start + role.fans[1]}" for role in roles)
        raise NormLabError(f"{name}: parts must follow one another from 0 to {size}, got {found}")


def xavier_std(role: Role, base: float) -> float:
    """√(2/(fan in + fan out)) for the matrices of sublayers; the base for embeddings, head, router and coefficients."""
    if role.role in ("embed", "head", "router", *COEFFICIENTS):
        return base
    fan_in, fan_out = role.fans
    return math.sqrt(2.0 / (fan_in + fan_out))
