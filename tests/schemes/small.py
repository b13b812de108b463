"""Small networks in float64 as a scheme starts them, with branches that are not the library's."""

import math
from types import SimpleNamespace

import torch

import normlab
from normlab.roles import Role

EPS64 = torch.finfo(torch.float64).eps


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(spec, depth, dim, **options):
    """(entry, blocks, exit) in float64, with gains as they start."""
    bound = normlab.scheme(spec, **options).bind(depth=depth, dim=dim)
    entry, exit_, *blocks = (
        part.double().requires_grad_(False) for part in (bound.entry(), bound.exit(), *map(bound.block, range(depth)))
    )
    return SimpleNamespace(entry=entry, blocks=blocks, exit=exit_)


def run(net, x, pairs):
    state = net.entry(x)
    for block, pair in zip(net.blocks, pairs, strict=True):
        state = block(state, pair)
    return net.exit(state)


def branch(dim, seed, hidden=9):
    first, second = gaussian(hidden, dim, seed=seed) / math.sqrt(dim), gaussian(dim, hidden, seed=seed + 1)
    return lambda x: torch.tanh(x @ first.T) @ second.T / math.sqrt(hidden)


def pairs(depth, dim):
    return [(branch(dim, 10 * k), branch(dim, 10 * k + 5)) for k in range(depth)]


def nothing(x):
    return torch.zeros_like(x)


def normalised(x, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def std_factor(spec, role, depth, **bind):
    """What a scheme multiplies the standard deviation of one square matrix with, against that of q."""
    scheme = normlab.scheme(spec)
    bound = scheme.bind(depth=depth, dim=8, **bind)
    parameter = torch.nn.Parameter(torch.empty(8, 8))
    of = {name: scheme.initial_std(Role("w", parameter, name), 0.02, bound) for name in ("q", role)}
    return of[role] / of["q"]
