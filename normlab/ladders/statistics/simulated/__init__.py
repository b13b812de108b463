"""Simulated ladders with a known gap, and how often the estimators' intervals cover it."""
