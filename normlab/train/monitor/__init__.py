"""Monitoring of a run: loss spikes, NaN and infinity, stuck losses, profiles, signals, and recovery from bad steps."""
