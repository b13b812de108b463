"""Estimators of a gap: M (smooth) and K (a simple law), as Gaussian priors over cells and places, and their noise."""
