"""Compile the kernels of a step for compute capability 9.0, without a GPU: every launch compiles and runs nothing.

`python -m tests.kernels.compile_without_gpu one|two|many|coefficients|dynamic WIDTH` prints one line per kernel: name,
warps, shared memory, registers of a thread, and bytes that it spills. The interpreter accepts code that the compiler
refuses, so parity alone does not say that a kernel can run. Not under TRITON_INTERPRET, which replaces the compiler.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from normlab.kernels import backends
from normlab.kernels.fused import (
    dual,
    dynamic_streams,
    dynamic_streams_gradient,
    launch,
    normalised_projection,
    partials,
    sinkhorn,
    streams,
    streams_gradient,
)
from normlab.kernels.geodesic import geodesic_pair
from normlab.kernels.lerp import sphere_lerp_pair
from normlab.kernels.residual import Affine, residual_step

_TYPES = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8",
}  # fmt: skip
_SHARED = 227 * 1024
"""Shared memory of one program on an H100 or H200, in bytes."""


def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, num_warps: int = 4, **named: Any) -> None:
    """In place of a launch: compile for these arguments."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    signature, constants, hints = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name], hints[(place,)] = _TYPES[value.dtype], [["tt.divisibility", 16]]
        elif value is None or name in fixed:
            signature[name], constants[(place,)] = "constexpr", value
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    source = ASTSource(kernel, signature, constants, hints)
    options = {"num_warps": num_warps} | {name: value for name, value in named.items() if name not in kernel.arg_names}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.metadata.shared <= _SHARED, f"{kernel.__name__} needs {found.metadata.shared} bytes"
    print(kernel.__name__, num_warps, found.metadata.shared, *_registers(found.asm["cubin"]))


def _registers(binary: bytes) -> tuple[str, ...]:
    """(registers of a thread, bytes on its stack), as the compiler's own tool reports them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout)
    assert found is not None, told.stdout
    return found.groups()


def one_stream(dim: int) -> None:
    """Steps through autograd, which decides what a backward kernel is given: an fp32 state, bf16 inputs of branches."""
    x, g = torch.zeros(64, dim, requires_grad=True), torch.zeros(64, dim).bfloat16().requires_grad_()
    gain, one = torch.ones(dim, requires_grad=True), torch.ones(1, requires_grad=True)
    norm, options = Affine("rms", gain, eps=1e-6), {"input_dtype": torch.bfloat16, "kernels": "triton"}
    constant = torch.ones((), dtype=torch.float64)
    for state, seen in (
        residual_step(x, None, read=norm, **options),
        residual_step(x, g, read=norm, **options),
        residual_step(x, g, write=norm, **options),
        residual_step(x, g, keep=constant, write=norm, read=norm, **options),
        residual_step(x, g, step=constant, shape=norm, read=norm, **options),
        geodesic_pair(x, g, constant, 0.8, a=one, b=one, **options),
        sphere_lerp_pair(x, g, gain, 1e-6, **options),
    ):
        torch.autograd.backward([state, seen], [state.detach(), seen.detach()])


def two_streams(dim: int) -> None:
    state, update = torch.zeros(64, 2, dim).bfloat16(), torch.zeros(64, dim).bfloat16()
    scale, gain = torch.ones(()), torch.ones(dim)
    for options in ((None, scale, gain, None, 1, 1e-6, False), (scale, None, None, gain, 2, 1e-6, True)):
        dual.forward(state, update, *options)
        dual.backward(state, update, *options, state, update)
        dual.backward(state, update, *options, None, update)


def many_streams(dim: int) -> None:
    x, f = torch.zeros(64, 4, dim).bfloat16(), torch.zeros(64, dim).bfloat16()
    post, comb, gain = torch.zeros(64, 4), torch.zeros(64, 4, 4), torch.ones(dim)
    norm = (gain, None, 1, 1e-6, False)
    static = (x, f, post[0], comb[0], post[0], *norm)
    write = (x, f, post, comb, None, None, None, 3, 0.0, False)
    read = (x, None, None, None, post, *norm)
    few = (x[:, :2], f, post[0, :2], comb[0, :2, :2], post[0, :2], *norm)
    for inputs, upstream in ((static, (x, f)), (few, (None, f)), (write, (x, None)), (read, (x, f))):
        streams.forward(*inputs)
        streams_gradient.backward(*inputs, *upstream)


def coefficients(dim: int) -> None:
    for size, rounds in ((4, 20), (3, 2)):
        logits = torch.zeros(64, size, size)
        sinkhorn.forward(logits, rounds, 1e-6)
        sinkhorn.backward(logits, logits, rounds, 1e-6)
    # Four streams in one row, streams as rows, and the most outputs.
    for outputs, width, dtype in ((24, 4 * dim, torch.bfloat16), (6, dim, torch.bfloat16), (64, dim, torch.float16)):
        x, weight = torch.zeros(64, width, dtype=dtype), torch.zeros(outputs, width)
        u, inverse = normalised_projection.forward(x, weight, 1e-6)
        for d_x in (x, None):
            normalised_projection.backward(x, weight, u, inverse, d_x, u)


def dynamic(dim: int) -> None:
    x, f, gain = torch.zeros(64, 4, dim).bfloat16(), torch.zeros(64, dim).bfloat16(), torch.ones(dim)
    post, comb, vector = torch.zeros(64, 4), torch.zeros(64, 4, 4), torch.zeros(4)
    # All streams of a token together, an exit, and each stream alone; without what is not there.
    for outputs, together, mixing, upstream in (
        (24, True, comb, x),
        (4, True, comb, None),
        (6, False, comb, x),
        (8, True, None, x),
    ):
        weight = torch.zeros(outputs, 4 * dim if together else dim)
        inputs = (x, f, post, mixing, weight, vector, vector, gain)
        state, _, *numbers = dynamic_streams.forward(*inputs, 1e-6, 1 if together else 2, together, 1e-6, 1e-6, False)
        d_u = None if upstream is None else numbers[0]
        options = (1 if together else 2, together, False)
        dynamic_streams_gradient.backward(*inputs, *options, state, *numbers, upstream, f, d_u)


if __name__ == "__main__":
    JITFunction.run = compile_only
    backends._why_not = lambda tensor: None
    partials._launches_early = lambda device: True
    launch._multiprocessors = lambda device: 132
    launch._shared_memory = lambda device: 228 * 1024
    steps = {
        "one": one_stream,
        "two": two_streams,
        "many": many_streams,
        "coefficients": coefficients,
        "dynamic": dynamic,
    }
    steps[sys.argv[1]](int(sys.argv[2]))
