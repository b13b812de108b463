"""Triton kernels, each beside nothing but what launches it; imported only where Triton is there to run them."""
