"""nGPT-pytorch 0.2.10: its `Residual` is our nGPT write, raw parameter and all.

Theirs takes α as it is, ours |α|; the two agree where α > 0, which is where nGPT starts.
"""

import torch
from nGPT_pytorch.nGPT import Attention, FeedForward, Residual
from torch import nn

import normlab

from .compare import WRONG, check, copy_gains, module_differences, scatter_, states, tolerance

D, DEPTH, ALPHA = 32, 2, 0.25


def compare(sign: float = 1.0) -> dict[str, float]:
    sublayers = [kind for _ in range(DEPTH) for kind in (Attention(D, dim_head=16, heads=2), FeedForward(D))]
    theirs = nn.Sequential(*(Residual(sublayer, D, ALPHA) for sublayer in sublayers)).double()
    raw = [residual.branch_scale.scale for residual in theirs]
    scatter_(raw, size=0.5 * D**-0.5)
    with torch.no_grad():
        raw[0][::2] *= sign
    # From block 1 on: block 0 of a stack normalises its input, which here lies on the sphere already.
    blocks = list(zip(sublayers[::2], sublayers[1::2], strict=True))
    scheme = normlab.scheme("ngpt", alpha=ALPHA, eps=0.0)
    stack = normlab.Stack(scheme, blocks, D, first=1, residual_only=True).double()
    x = nn.functional.normalize(states(D), dim=-1).detach().requires_grad_()
    return module_differences(theirs, stack, x, copy_gains(stack, raw))


def test_value_and_gradients_match():
    check(compare(), tolerance())


def test_a_negative_step_is_told_apart():
    found = compare(sign=-1.0)
    assert found["output"] > WRONG
    assert found["gradient of input"] > WRONG
