"""Comparisons: grids of runs, the store of their results, and what the results show."""
