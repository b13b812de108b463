"""Whole stacks with fused kernels: the same outputs, gradients and records as without, for every scheme."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import normlab
from normlab.models import MLP, Attention
from normlab.schemes.contract.parts import split_read
from tests.kernels.graphs import compiled_graphs, count
from tests.matrix import parametrize

pytestmark = pytest.mark.filterwarnings(
    # Dynamo itself instantiates autograd functions and looks at .grad of what is no leaf.
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)

DIM, DEPTH = 64, 3
SPECS = [
    *normlab.list_schemes(),
    "pre(norm='layer', bias=True)",
    "pre(step=0.5)",
    "peri(gain='offset', step=0.1)",
    "post(norm='layer', gain='none')",
    "layerscale(scalar=True)",
    "hybrid(star=True)",
    "geonorm(decay='sqrt', learned=False, input_norm=True)",
    "pre(norm='dyt')",
    "hc(dynamic=False)",
    "mhc(mixing='none')",
    "mhc(rounds=2)",
]


def seeded(seed: int, device: torch.device | None = None) -> torch.Generator:
    return torch.Generator(device or torch.get_default_device()).manual_seed(seed)


def build(spec: str, kernels: str, topology: str = "serial") -> normlab.Stack:
    torch.manual_seed(0)
    blocks = [(Attention(DIM, 4), MLP(DIM, 64)) for _ in range(DEPTH)]
    stack = normlab.Stack(spec, blocks, DIM, kernels=kernels, topology=topology)
    return stack.init_(std=0.1, generator=seeded(0))


def run(stack: normlab.Stack, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradient of the input, gradient of every parameter."""
    x = x.detach().requires_grad_()
    y = stack(x)
    weights = torch.randn(y.shape, generator=seeded(1, y.device), device=y.device)
    stack.zero_grad()
    (y * weights).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in stack.parameters())]


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor], roundings: float, floor: float = 1e-2) -> None:
    for one, two in zip(ours, theirs, strict=True):
        assert (one - two).abs().max() <= roundings * 2.0**-24 * two.abs().max().clamp_min(floor)


def floor(spec: str) -> float:
    """Size of the terms of the smallest gradients."""
    # While streams are alike, a coefficient before a norm has no gradient: what is left are roundings of its terms.
    return 0.1 if normlab.scheme(spec).streams > 2 else 1e-2


class Foreign(torch.nn.Linear):
    """A branch that does not say that it casts its input."""


def autocast_run(spec: str, kernels: str, casts: bool) -> list[torch.Tensor]:
    x = torch.randn(2, 5, DIM, generator=seeded(3), device=torch.get_default_device())
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Attention, MLP):
            patch.setattr(kind, "casts_input", casts)
        # fp16: Triton's interpreter rounds it as torch does, which it does not with bf16.
        with torch.autocast(x.device.type, torch.float16):
            return run(build(spec, kernels), x)


CASTS = ["pre", "geonorm", "spannorm", "ngpt", "peri"]


@parametrize("spec", SPECS, quick=CASTS)
def test_inputs_in_the_dtype_of_autocast_change_nothing(spec):
    for kernels in ("triton", "reference"):
        for narrow, cast in zip(autocast_run(spec, kernels, True), autocast_run(spec, kernels, False), strict=True):
            assert torch.equal(narrow, cast)


@parametrize("spec", [*CASTS, "post", "lns", "deepnorm", "keel"], quick=CASTS)
def test_branches_are_handed_the_dtype_of_autocast(spec, monkeypatch):
    stack, seen = build(spec, "triton"), []
    for kind in (Attention, MLP):
        # Not a hook: blocks with hooks are not fused with each other.
        forward = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, x, forward=forward: seen.append(x.dtype) or forward(self, x))
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        state = stack(torch.randn(2, 5, DIM))
    # The first branch may read the entry, which no step has written.
    assert seen[1:] == [torch.bfloat16] * (2 * DEPTH - 1)
    assert state.dtype == torch.float32
    seen.clear()
    stack(torch.randn(2, 5, DIM))
    assert set(seen) == {torch.float32}


class Doubled(Attention):
    """Attention whose input goes elsewhere, too."""

    def forward(self, x, **options):
        return super().forward(x, **options) + x


class Wrapped(torch.nn.Module):
    """A linear layer in a wrapper, as LoRA's."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.linear, self.weight, self.bias = linear, linear.weight, linear.bias

    def forward(self, x):
        return self.linear(x)


def replace_forward(module: torch.nn.Module) -> None:
    """As Accelerate's hooks and some LoRAs do."""
    forward = module.forward
    module.forward = lambda x, **options: forward(x, **options)


def test_changed_branches_are_handed_the_dtype_of_the_state():
    stack, x = build("pre", "triton"), torch.randn(2, 5, DIM)
    notes = [[step.read.branch_casts for step in layer.block.steps] for layer in stack.layers]
    assert notes == [[True, True]] * DEPTH
    stack.layers[0].branches[1] = Foreign(DIM, DIM)
    stack.layers[1].branches[0] = Doubled(DIM, 4)
    stack.layers[2].branches[1].gate_up = Wrapped(stack.layers[2].branches[1].gate_up)
    with torch.autocast(x.device.type, torch.bfloat16):
        stack(x)
    notes = [[step.read.branch_casts for step in layer.block.steps] for layer in stack.layers]
    assert notes == [[True, False], [False, True], [True, False]]


def test_branches_with_a_replaced_forward_are_handed_the_dtype_of_the_state():
    stack, x = build("pre", "triton"), torch.randn(2, 5, DIM)
    replace_forward(stack.layers[0].branches[1])
    replace_forward(stack.layers[1].branches[0].qkv)
    with torch.autocast(x.device.type, torch.bfloat16):
        stack(x)
    notes = [[step.read.branch_casts for step in layer.block.steps] for layer in stack.layers]
    assert notes == [[True, False], [False, True], [True, True]]


def inputs_in_hooks(kernels: str) -> list[torch.Tensor]:
    stack, x = build("pre", kernels), torch.randn(2, 5, DIM, generator=seeded(3), device=torch.get_default_device())
    seen: list[torch.Tensor] = []
    stack.layers[0].branches[1].register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    stack.layers[1].branches[0].qkv.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    with torch.autocast(x.device.type, torch.float16):
        stack(x)
    return seen


def test_hooks_on_branches_see_the_input_that_the_reference_hands_over():
    for fused, reference in zip(inputs_in_hooks("triton"), inputs_in_hooks("reference"), strict=True):
        assert fused.dtype == reference.dtype == torch.float32
        # Up to the first block's rounding in half precision; a rounded input would be one in fp16.
        assert not torch.equal(fused, fused.half().float())
        assert (fused - reference).abs().max() <= 8 * 2.0**-11 * reference.abs().max()


def test_layers_compiled_without_autocast_share_one_graph(request):
    request.getfixturevalue("no_default_device")
    stack, graphs = build("pre", "triton"), []
    torch._dynamo.reset()
    stack.compile_layers(backend=lambda module, _: graphs.append(module) or module.forward)
    stack(torch.randn(2, 5, DIM))
    # The last block's exit is no read of a branch, and a norm like the others.
    assert len(graphs) == 1


@parametrize("spec", CASTS, quick=["pre"])
def test_compiled_stacks_cast_no_input(spec, request):
    request.getfixturevalue("no_default_device")
    stack = build(spec, "triton")
    with torch.autocast("cpu", torch.bfloat16):
        graphs = compiled_graphs(stack, torch.randn(2, 5, DIM).requires_grad_())
    casts = [count(nodes, "aten._to_copy", (2, 5, DIM)) for nodes in graphs]
    # The entry is no fused step; its cast is one forward and one backward if the first branch reads it as it is.
    entry = isinstance(stack.layers[0].block.first_read, torch.nn.Identity)
    assert casts == [entry, entry]


def test_foreign_branches_are_handed_the_dtype_of_the_state():
    blocks = [(Foreign(DIM, DIM), Foreign(DIM, DIM)) for _ in range(DEPTH)]
    stack, seen = normlab.Stack("pre", blocks, DIM, kernels="triton"), []
    for block in blocks:
        for branch in block:
            branch.register_forward_pre_hook(lambda module, given: seen.append(given[0].dtype))
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        stack(torch.randn(2, 5, DIM))
    assert seen == [torch.float32] * (2 * DEPTH)


QUICK = ["pre", "post", "peri", "geonorm", "ngpt", "spannorm", "hybrid", "dual", "mhc(rounds=2)", "pre(norm='dyt')"]


@parametrize("spec", SPECS, quick=QUICK)
def test_fused_and_reference_agree(spec):
    x = torch.randn(2, 5, DIM)
    # Six sublayers, each some forty fp32 roundings in norms and products, forward and backward.
    close(run(build(spec, "triton"), x), run(build(spec, "reference"), x), 500, floor(spec))


@parametrize("spec", ["pre", "post", "peri", "geonorm", "ngpt"], quick=["peri", "geonorm"])
def test_parallel_blocks_agree(spec):
    x = torch.randn(2, 5, DIM)
    close(run(build(spec, "triton", "parallel"), x), run(build(spec, "reference", "parallel"), x), 500)


def _keep_output(seen, name, _module, _inputs, output):
    # A read may hand further tensors to its write.
    seen.append((name, split_read(output)[0].detach()))


@pytest.mark.parametrize("spec", normlab.list_schemes())
def test_hooks_see_the_same_records(spec):
    x = torch.randn(2, 5, DIM)
    records = []
    for kernels in ("triton", "reference"):
        stack, seen = build(spec, kernels), []
        for name, module in stack.named_modules():
            if name.startswith("layers"):
                module.register_forward_hook(partial(_keep_output, seen, name))
        stack(x)
        records.append(seen)
    fused, reference = records
    assert [name for name, _ in fused] == [name for name, _ in reference]
    for (name, one), (_, two) in zip(fused, reference, strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-5), name


def test_hooks_on_all_modules_see_every_part():
    from torch.nn.modules.module import register_module_forward_hook

    seen: list[str] = []
    handle = register_module_forward_hook(lambda module, _i, _o: seen.append(type(module).__name__))
    try:
        build("peri", "triton")(torch.randn(2, 5, DIM))
    finally:
        handle.remove()
    assert seen.count("Add") == 2 * DEPTH
    # Four in a block, and one at each end.
    assert seen.count("RMSNorm") == 4 * DEPTH + 2


@parametrize("spec", normlab.list_schemes(), quick=["pre", "peri", "geonorm", "ngpt", "spannorm"])
def test_hooks_on_layers_alone_see_settled_states(spec):
    x = torch.randn(2, 5, DIM)
    states: dict[str, list[torch.Tensor]] = {}
    for kernels in ("triton", "reference"):
        stack, seen = build(spec, kernels), []
        for layer in stack.layers:
            layer.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out.detach()))
        seen.append(stack(x).detach())
        states[kernels] = seen
    assert len(states["triton"]) == DEPTH + 1
    for one, two in zip(states["triton"], states["reference"], strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("spec", ["pre", "peri", "post", "spannorm", "dual", "hc(dynamic=False)", "hc", "mhc"])
def test_fused_stacks_compile_whole_and_checkpoint(spec, request):
    torch._dynamo.reset()
    x = torch.randn(2, 5, DIM)
    stack = build(spec, "triton")
    expected = run(stack, x)
    stack.checkpointing = True
    close(run(stack, x), expected, 500, floor(spec))
    stack.checkpointing = False
    request.getfixturevalue("no_default_device")
    stack.compile(fullgraph=True, backend="aot_eager")
    close(run(stack, x), expected, 500, floor(spec))


EVALUATED = ["pre", "geonorm", "ngpt", "dual", "hc(dynamic=False)", "mhc(rounds=2)"]


@parametrize("spec", EVALUATED, quick=["dual", "mhc(rounds=2)"])
def test_fused_stacks_compile_without_gradients(spec, request):
    # An evaluation: the compiler then calls `forward` of an autograd function itself.
    torch._dynamo.reset()
    x, stack = torch.randn(2, 5, DIM), build(spec, "triton")
    request.getfixturevalue("no_default_device")
    with torch.no_grad():
        expected = stack(x)
        stack.compile(fullgraph=True, backend="eager")
        assert torch.equal(stack(x), expected)


def test_constants_are_where_the_kernel_can_read_them():
    # Built beside the stream or moved there later, under any default device.
    for stack in (build("lns", "triton"), build("lns", "triton").cpu().to(torch.get_default_device())):
        assert stack(torch.randn(1, 2, DIM)).isfinite().all()


def test_a_kernel_that_cannot_run_is_an_error(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(normlab.NormLabError, match="kernels='triton' cannot run: the tensor is on cpu"):
        build("pre", "triton").cpu()(torch.randn(1, DIM, device="cpu"))
    assert build("pre", "auto").cpu()(torch.randn(1, 2, DIM, device="cpu")).isfinite().all()
