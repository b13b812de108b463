"""Coordinate checks: how activations, and what training changes in them, depend on width and depth."""
