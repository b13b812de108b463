"""Points and tangents to try, the functions under test, and what rounding may cost them."""

import math
import warnings

import torch

from normlab.geometry import angle, distance, exp, log, norm, project, transport, unit

with warnings.catch_warnings():
    # Calls torch.jit.script when imported, which torch deprecates; it is torch's own, for forward mode.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp

HALF = (torch.float16, torch.bfloat16)
FULL = (torch.float32, torch.float64)
# Each function of vectors with the number of its arguments; distances have no last dimension.
FUNCTIONS = ((norm, 1), (unit, 1), (project, 2), (exp, 2), (angle, 2), (distance, 2), (log, 2), (transport, 3))


def eps(dtype):
    return torch.finfo(dtype).eps


def rounding(width, dtype):
    # Relative error of one function's answer. An inner product of `width` terms costs at most log2(width)/2 + 1 eps
    # with pairwise sums; two norms and a projection enter each function, and about four more roundings follow.
    return (3 * (math.log2(width) / 2 + 1) + 4) * eps(dtype)


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def vectors(count, *shape, seed=0, dtype=torch.float64):
    return [gaussian(*shape, seed=1000 * seed + k, dtype=dtype) for k in range(count)]


def frame(width, seed=0, dtype=torch.float64):
    """Three orthonormal vectors: a point a, a direction d, and e orthogonal to both."""
    q, _ = torch.linalg.qr(gaussian(width, 3, seed=seed))
    return q.to(dtype).T.contiguous().unbind(0)


def along(function, at, direction):
    """Directional derivative by reverse mode (all the rows of the Jacobian)."""
    return torch.autograd.functional.jacobian(function, at) @ direction
