"""Run by test_residual_dual.py with x-transformers 1.44.8 first on the path; prints the differences as JSON."""

import importlib.metadata
import json

import torch

import normlab

from .compare import copy_gains, module_differences, quiet_imports, relative, scatter_, states

with quiet_imports():
    from x_transformers import Decoder

D, DEPTH, SCALE = 32, 4, 0.5


def compare(**options) -> dict[str, float]:
    torch.manual_seed(0)
    theirs = Decoder(
        dim=D, depth=DEPTH, heads=2, attn_dim_head=32, use_rmsnorm=True, resi_dual=True, resi_dual_scale=SCALE
    ).double()
    gains = [after_sum.g for (_, _, after_sum), _, _ in theirs.layers] + [theirs.final_norm.g]
    scatter_(gains)
    sublayers = [sublayer for _, sublayer, _ in theirs.layers]
    blocks = list(zip(sublayers[::2], sublayers[1::2], strict=True))
    scheme = normlab.scheme("dual", **{"scale": SCALE, "eps": 0.0, "final_eps": 0.0} | options)
    stack = normlab.Stack(scheme, blocks, D).double()
    counterpart = copy_gains(stack, gains, offset=float(theirs.final_norm.unit_offset))
    # The final norm removes the scale of the second stream, so the stream itself is compared as well.
    collected = []
    for norm in (theirs.final_norm, stack.exit.norm):
        norm.register_forward_pre_hook(lambda _, inputs: collected.append(inputs[0]))
    found = module_differences(theirs, stack, states(D), counterpart)
    their_stream, our_stream = collected
    return {"second stream": relative(our_stream, their_stream)} | found


if __name__ == "__main__":
    results = {
        "version": importlib.metadata.version("x-transformers"),
        "same": compare(),
        "wrong weight": compare(post_weight=0.9),
        "wrong scale": compare(scale=1.0),
    }
    print(json.dumps(results))
