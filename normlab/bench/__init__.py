"""Benchmarks: fused kernels against copy bandwidth and other libraries, whole training steps, many runs on one GPU."""
