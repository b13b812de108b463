"""Fused residual steps as functions with autograd, on the last dimension; the reference runs where no kernel can."""

from __future__ import annotations

from normlab.kernels.geodesic import geodesic_step
from normlab.kernels.lerp import sphere_lerp, unit_rows_
from normlab.kernels.residual import Affine, residual_step

__all__ = ["Affine", "geodesic_step", "residual_step", "sphere_lerp", "unit_rows_"]
