"""Distributions and fits in numpy, without scipy: Student's t, normal, chi-square and F, power laws."""
