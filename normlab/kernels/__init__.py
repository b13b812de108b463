"""Fused residual steps: PyTorch references, custom operators, Triton kernels in `fused/`. Public in `normlab.ops`."""
