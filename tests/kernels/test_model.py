"""Whole decoders with every kernel there is: the same loss and gradients as with none."""

from __future__ import annotations

import pytest
import torch

from normlab import Decoder, DecoderConfig
from normlab.kernels import cross_entropy_gradient, rotary, swiglu
from tests.kernels.graphs import compiled_graphs
from tests.matrix import parametrize

VOCABULARY = 211


def build(kernels: str, **changes) -> Decoder:
    torch.manual_seed(0)
    sizes = {"depth": 2, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": VOCABULARY, "max_length": 32}
    return Decoder(DecoderConfig(**{"scheme": "pre", "init_std": 0.1, **sizes, "kernels": kernels, **changes}))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = torch.randint(0, VOCABULARY, (2, 3, 17)).unbind()
    targets[0, :5] = -100
    return tokens, targets


def run(model: Decoder, tokens, targets, call=None, **options) -> list[torch.Tensor]:
    """The loss and the gradient of every parameter."""
    loss = (call or model.loss)(tokens, targets, z_loss=1e-3, chunk=20, **options)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def close(ours, theirs, roundings: float) -> None:
    for one, two in zip(ours, theirs, strict=True):
        assert (one - two).abs().max() <= roundings * 2.0**-24 * two.abs().max().clamp_min(1e-2)


@parametrize("tied", [True, False], quick=[True])
@parametrize("mlp", ["swiglu", "gelu"], quick=["swiglu"])
@parametrize("scheme", ["pre", "geonorm"], quick=["geonorm"])
def test_loss_and_every_gradient(scheme, mlp, tied):
    data, options = batch(), {"scheme": scheme, "mlp": mlp, "bias": scheme == "pre", "tied": tied}
    # Four sublayers, each some forty fp32 roundings in norms and products, forward and backward, and the head.
    close(run(build("triton", **options), *data), run(build("reference", **options), *data), 500)


def test_a_scheme_that_fills_every_slot():
    data = batch()
    close(run(build("triton", scheme="ngpt"), *data), run(build("reference", scheme="ngpt"), *data), 500)


def test_scales_in_an_mlp_become_part_of_its_matrix(monkeypatch):
    called = []
    op = swiglu._backward_op
    monkeypatch.setattr(swiglu, "_backward_op", lambda *a: called.append(a[0].shape) or op(*a))
    model, data = build("triton", scheme="ngpt"), batch()
    expected = run(model, *data)
    assert len(called) == 2
    # Whoever looks at a scale sees what passes through it.
    seen = []
    mlp = model.stack.layers[0].branches[1]
    handle = mlp.gate_scale.register_forward_hook(lambda module, given, got: seen.append((given[0], got)))
    called.clear()
    close(run(model, *data), expected, 500)
    handle.remove()
    assert len(called) == 1
    assert torch.equal(seen[0][1], mlp.gate_scale(seen[0][0]))


@pytest.mark.full
def test_packed_documents():
    tokens, targets = batch()
    documents = torch.arange(17).expand(3, 17) // torch.tensor([[4], [5], [9]])
    ours, theirs = (run(build(k), tokens, targets, documents=documents) for k in ("triton", "reference"))
    close(ours, theirs, 500)


def test_every_kernel_is_called(monkeypatch):
    called = []
    for module, name in ((rotary, "_backward_op"), (cross_entropy_gradient, "_gradient_op"), (swiglu, "_backward_op")):
        op = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, op=op: called.append(op._name) or op(*a))
    run(build("triton"), *batch())
    # 51 rows of logits, 20 at a time; then the blocks from the last to the first.
    blocks = ["swiglu_backward", "rotary_backward"] * 2
    assert called == ["cross_entropy_gradient_"] * 3 + blocks
    called.clear()
    run(build("reference"), *batch())
    assert called == []
    run(build("auto"), *batch())
    assert bool(called) == batch()[0].is_cuda


@pytest.mark.full
def test_half_precision_is_no_worse_than_the_reference():
    data = batch()
    exact = run(build("reference").double(), *data)
    errors = {}
    for kernels in ("triton", "reference"):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            found = run(build(kernels), *data)
        errors[kernels] = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    # Both round some twenty times to 2^-9 on the way; the interpreter truncates, and so does it twice as badly.
    for one, two in zip(errors["triton"], errors["reference"], strict=True):
        assert one <= 2 * two + 2.0**-8


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "autocast"),
    [("aot_eager", True), ("inductor", True), ("inductor", False)],
)
def test_a_compiled_loss_is_one_graph(backend, autocast, request):
    torch._dynamo.reset()
    data, model = batch(), build("triton", depth=1)
    request.getfixturevalue("no_default_device")
    with torch.autocast(data[0].device.type, torch.bfloat16, enabled=autocast):
        expected = run(model, *data)
        found = run(model, *data, torch.compile(model.loss, fullgraph=True, backend=backend))
    if not autocast:
        close(found, expected, 500)
    for one, two in zip(found, expected, strict=True):
        # Compiled code keeps fp32 where eager code rounds to bf16: 2^-8 a value, some twenty times.
        assert (one - two).norm() <= 2.0**-6 * two.norm()


@pytest.mark.full
def test_checkpointing_changes_nothing():
    data = batch()
    close(run(build("triton", checkpointing=True), *data), run(build("triton"), *data), 500)


def test_generation_takes_the_same_path():
    tokens = torch.randint(0, VOCABULARY, (2, 5))
    ours, theirs = (build(k).generate(tokens, 4, temperature=0.0) for k in ("triton", "reference"))
    assert torch.equal(ours, theirs)


@pytest.mark.full
def test_experts_keep_the_plain_path():
    data, options = batch(), {"experts": 4, "shared_hidden": 16}
    close(run(build("triton", **options), *data), run(build("reference", **options), *data), 500)


def nodes(scheme: str, depth: int) -> int:
    """Nodes of the compiled forward and backward graph, with a bf16 stream."""
    model, data = build("triton", scheme=scheme, depth=depth, stream="bf16"), batch()
    with torch.autocast(data[0].device.type, torch.bfloat16):
        return sum(map(len, compiled_graphs(model.loss, *data)))


@pytest.mark.full
def test_graphs_with_dynamic_coefficients_stay_small(no_default_device):
    one, two = ({depth: nodes(scheme, depth) for depth in (1, 2)} for scheme in ("pre", "mhc(rounds=2)"))
    # However many rounds there are: in plain operators each of them takes more than ten nodes.
    assert nodes("mhc", 1) == two[1]
    # A sublayer of Pre-Norm is one kernel beside the branch; here it is four, each with up to six results, and up to
    # twenty operators on coefficients in either direction. Branches have about 70 nodes a sublayer in both.
    assert two[2] - two[1] <= 2.25 * (one[2] - one[1])
