"""Measurements on a particle system: observables, clusters, fitted decay rates, and predicted tails."""
