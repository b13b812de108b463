"""Roles: what each parameter of a model is for, so that a scheme can initialise, decay and constrain it.

A matrix is named by what it does in a Transformer (`q k v o gate up down embed head router`, and `patch position` for
images); everything with one dimension or none is a `bias` or a `vector` (gains, scales). A matrix nobody can name is an
error, never a guess.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from normlab.errors import NormLabError

READERS = ("q", "k", "v", "gate", "up", "head", "router")
"""Matrices that read the residual stream: the model dimension is their input axis."""

WRITERS = ("o", "down", "embed", "patch", "position")
"""Matrices that write to it: the model dimension is their output axis."""

OUTPUTS = ("o", "down")
"""The last matrix of a sublayer: what depth-scaled and zero initialisation act on."""

FRONT = ("patch", "position")
"""What images are embedded with: the projection of a patch, and the places of patches, that of a class token too."""

MATRICES = READERS + WRITERS
VECTORS = ("bias", "vector")


class Part(NamedTuple):
    """A role, where it lies in its parameter, and which axis the input comes in on."""

    role: str
    start: int = 0
    length: int | None = None
    """Rows [start, start + length) of the output axis; None: up to the end. A fused QKV matrix is three parts."""
    input_axis: int = -1
    """-1 for `nn.Linear` (out, in); -2 for GPT-2's transposed layers and for embeddings, which are looked up by row."""


Spec = str | Part | Sequence[Part]
"""How a user or a module states the role of one parameter."""


@runtime_checkable
class KnowsItsRoles(Protocol):
    """A module that states the roles of the parameters below it, by dotted name."""

    def parameter_roles(self) -> Mapping[str, Spec]: ...


@dataclass(frozen=True, eq=False)
class Role:
    """One named part of one parameter."""

    name: str
    parameter: nn.Parameter
    role: str
    start: int = 0
    length: int | None = None
    input_axis: int = -1

    @property
    def output_axis(self) -> int:
        # Of the last two axes; leading ones (stacked experts) are a batch.
        return -2 if self.input_axis == -1 else -1

    @property
    def model_axis(self) -> int:
        """The axis along the width of the model."""
        return self.output_axis if self.role in WRITERS else self.input_axis

    @property
    def is_matrix(self) -> bool:
        return self.role in MATRICES

    def view(self) -> torch.Tensor:
        """The part itself, sharing memory with the parameter."""
        if _is_sharded(self.parameter) and not self.is_whole:
            raise NormLabError(f"{self.name}: a part of a sharded parameter has no view; write to it through edit()")
        return self._cut(self.parameter.detach())

    @contextmanager
    def edit(self) -> Iterator[torch.Tensor]:
        """The part as a plain tensor to write into, in one process or sharded over many (FSDP2).

        A sharded parameter is gathered and handed back as the first rank wrote it: for initialisation, not for every
        step.
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
        return self.start == 0 and (self.length is None or self.length == self.parameter.shape[self.output_axis])

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.is_whole else tensor.narrow(self.output_axis, self.start, self._length)

    @property
    def _length(self) -> int:
        return self.parameter.shape[self.output_axis] - self.start if self.length is None else self.length

    @property
    def fans(self) -> tuple[int, int]:
        """(fan in, fan out) of this part alone, so that a fused matrix is initialised as its pieces would be."""
        return self.parameter.shape[self.input_axis], self._length


def whole_parameters(roles: Sequence[Role]) -> list[Role]:
    """One role for each parameter whose parts agree on the model's axis: what is done along that axis alone can then
    be done to all of it at once, which also works on shards. Parts that disagree stay apart.
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


# Names used by the common public code bases. Fused matrices whose parts have equal length are listed apart, with the
# order of their parts; grouped-query fusions have unequal parts and must be stated by their module or by the user.
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
    """The roles of every parameter of `module`, each covered exactly once.

    `given` maps name patterns (`"*.mlp.0.weight"`) to roles and wins over what modules say of themselves, which wins
    over well-known names, which win over `otherwise`. Matrices that remain without a role raise one error that lists
    them.
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
    # QKV of three equal squares is certain; anything else (grouped queries) is for the module or the user to say.
    if rows % len(roles) or (len(roles) == 3 and rows != 3 * model):
        return None
    each = rows // len(roles)
    return [Part(role, i * each, each, input_axis) for i, role in enumerate(roles)]


def _expand(name: str, parameter: nn.Parameter, spec: Spec) -> list[Role]:
    parts = [Part(spec)] if isinstance(spec, str) else [spec] if isinstance(spec, Part) else list(spec)
    for part in parts:
        if part.role not in MATRICES + VECTORS:
            raise NormLabError(f"{name}: unknown role {part.role!r}; expected one of {', '.join(MATRICES + VECTORS)}")
    return [Role(name, parameter, *part) for part in parts]


def xavier_std(role: Role, base: float) -> float:
    """√(2/(fan in + fan out)) for the matrices of sublayers; the base for embeddings, head and router."""
    if role.role in ("embed", "head", "router"):
        return base
    fan_in, fan_out = role.fans
    return math.sqrt(2.0 / (fan_in + fan_out))
