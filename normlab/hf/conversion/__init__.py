"""Hugging Face models in: identify the scheme of their layers, and convert them to another."""
