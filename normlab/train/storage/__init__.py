"""What a run keeps on disk: its folder, checkpoints, weights, random states and metrics."""
