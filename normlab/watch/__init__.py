"""`normlab watch`: a local, read-only page of runs in progress, read from their folders alone; works without torch."""
