"""Steps as functions: autograd, any batch shape, last dimension; the reference where no kernel can run."""

from __future__ import annotations

from normlab.kernels.geodesic import geodesic_step

__all__ = ["geodesic_step"]
