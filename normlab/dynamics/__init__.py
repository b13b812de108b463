"""Dynamics: what a scheme does to tokens through depth, as particles that attract each other on a sphere.

attention -> flow (a scheme's law makes it a velocity) -> integrators -> observables -> experiments
"""
