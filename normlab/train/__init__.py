"""Training: one run, on one device or many."""
