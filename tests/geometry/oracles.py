"""Spheres of other people: geoopt's, and the formulas of geomstats' Hypersphere for unit points and tangent vectors."""

import warnings

import torch

with warnings.catch_warnings():
    # Calls torch.jit.script when imported, which torch deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    import geoopt

SPHERE = geoopt.Sphere()


def geomstats_exp(x, u):
    theta = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    return theta.cos() * x + theta.sin() / theta * u


def geomstats_log(x, y):
    theta = (x * y).sum(-1, keepdim=True).clamp(-1, 1).acos()
    return theta / theta.sin() * y - theta / theta.tan() * x


def geomstats_transport(x, direction, u):
    theta = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    heading = direction / theta
    part = (heading * u).sum(-1, keepdim=True)
    return u - part * heading + part * (theta.cos() * heading - theta.sin() * x)
