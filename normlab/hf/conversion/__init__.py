"""Identify the normalisation scheme of a Hugging Face model, and convert its layers to another scheme."""
