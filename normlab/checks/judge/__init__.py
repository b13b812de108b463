"""Verdicts of a check: growth, collapse, faults, structure; thresholds, blame and remedies."""
