"""Monitoring of a run: loss spikes, NaN and infinity, stuck losses, profiles, and recovery from bad steps."""
