"""Faults that training curves hide: untrained parameters, leaks, missing norms, gains on skips, a wrong start."""
