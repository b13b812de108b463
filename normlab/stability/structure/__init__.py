"""Faults of a design that training curves hide: what is not trained, what leaks, which norm is missing, how it starts."""
