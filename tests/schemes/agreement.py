"""How two ways of computing a network are compared: output and all gradients, to a tolerance that is measured."""

import torch

from .small import EPS64, gaussian


def tolerances(evaluate, x, sublayers):
    """How far two correct ways of computing may lie apart: one number for each tensor that `evaluate(x)` returns.

    Sums have at most 16 terms and a sublayer has about 12 operations in a row (three products, a softmax, two norms,
    the write), forward and again backward: under 100 eps of what stands there. What the rest of the network makes of
    such an error is measured: by how much a relative change of 1e-9 in the embedding changes each result.
    """
    signs = gaussian(*x.shape, seed=2).sign()
    near = evaluate((x.detach() * (1 + 1e-9 * signs)).requires_grad_())
    change = [float((a - b).detach().abs().max()) / 1e-9 for a, b in zip(evaluate(x), near, strict=True)]
    size = [float(a.detach().abs().max()) for a in near]
    return [100 * sublayers * EPS64 * max(1.0, a, b) for a, b in zip(change, size, strict=True)]


def with_gradients(result, leaves):
    direction = gaussian(*result.shape, seed=99)
    return [result, *torch.autograd.grad((result * direction).sum(), leaves)]
