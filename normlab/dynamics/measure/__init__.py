"""Observables of a particle system: cosines, clusters, ranks, and the rates fitted to them."""
