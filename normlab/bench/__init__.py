"""Benchmarks: fused kernels against copy bandwidth and other libraries, and whole training steps."""
