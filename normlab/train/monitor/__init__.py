"""What watches a run: spikes, values that are not finite, stuck losses, profiles, and what is done about them."""
