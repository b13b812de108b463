"""Scaling ladders: does the gain of a scheme survive larger models and longer training?"""
