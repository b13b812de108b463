"""Estimators of a gap, smooth and simple-law, as Gaussian priors over cells and places, and their noise."""
