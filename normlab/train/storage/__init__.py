"""Files of a run: folder layout, checkpoints, weights, random states, metrics."""
