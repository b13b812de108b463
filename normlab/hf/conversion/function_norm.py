"""Norms computed by functions instead of modules: F.rms_norm(x), x * rsqrt(mean(x²) + eps)."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from normlab.hf.conversion.trace import BranchProgram, get_part

NORM_FUNCTIONS = (F.rms_norm, F.layer_norm, torch.rms_norm, torch.layer_norm)
_PRODUCTS = (operator.mul, operator.truediv, torch.mul, torch.div)
_AGREE = 1e-4


@dataclass(frozen=True)
class FunctionNorm:
    """Part of a traced forward pass that may be a norm, named by its last function."""

    name: str
    program: BranchProgram

    def __str__(self) -> str:
        return self.name

    def of(self, layer: nn.Module) -> nn.Module:
        """The norm as a module that holds the parameters it uses."""
        return _AsModule(self.program, layer)


class _AsModule(nn.Module):
    def __init__(self, program: BranchProgram, layer: nn.Module):
        super().__init__()
        used = {call.target for call in program.calls if call.kind == "get_attr"}
        for path in used:
            setattr(self, _flat(path), get_part(layer, path))
        calls = [dataclasses.replace(c, target=_flat(c.target)) if c.target in used else c for c in program.calls]
        self._program = dataclasses.replace(program, calls=tuple(calls))

    def forward(self, x: Tensor) -> Tensor:
        return self._program(self, {}, x)


def _flat(path: str) -> str:
    return path.replace(".", "_")


def may_be_norm(node: fx.Node) -> bool:
    """Whether a node can be the last operation of a norm: a norm function, a product or a quotient."""
    by_method = node.op == "call_method" and node.target in ("mul", "div")
    return by_method or (node.op == "call_function" and node.target in (*NORM_FUNCTIONS, *_PRODUCTS))


class FinalNorm(TorchFunctionMode):
    """Torch function mode that records the first function that normalises the output of the last block."""

    def __init__(self, last: list[Tensor]):
        super().__init__()
        self.last = last
        self.found: str | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = func(*args, **(kwargs or {}))
        if self.last and self.found is None and isinstance(output, Tensor):
            with torch._C.DisableTorchFunction():
                if self._is_norm(func, args, output):
                    self.found = func.__name__
        return output

    def _is_norm(self, func: object, args: tuple[object, ...], output: Tensor) -> bool:
        state = self.last[-1]
        if func in NORM_FUNCTIONS:
            return bool(args) and args[0] is state
        if output.shape != state.shape or output.is_meta or not output.is_floating_point():
            return False
        return any(torch.allclose(output.float(), one, _AGREE, _AGREE) for one in _normalised(state.float()))


def _normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    width = (x.shape[-1],)
    return F.rms_norm(x, width, eps=1e-6), F.layer_norm(x, width, eps=1e-6)
