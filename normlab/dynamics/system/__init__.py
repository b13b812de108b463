"""The particle system: attention, velocity, integrators, speed laws, weights, and the network itself."""
