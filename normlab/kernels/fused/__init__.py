"""Triton kernels and the functions that launch them; imported only if Triton is available."""
