"""Structural tests: untrained parameters, leaks between tokens or samples, missing norms, skip gains, first loss."""
