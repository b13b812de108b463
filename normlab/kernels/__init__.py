"""Fused steps. `normlab.ops` is the public face of this folder."""
