"""Speed against limits and peers: kernels on their own, and whole training steps."""
