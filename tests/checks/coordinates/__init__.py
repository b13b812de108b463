"""Tests of coordinate checks."""
