"""The particle system: attention among tokens, velocity, ODE integrators, speed laws, weights, the real network."""
