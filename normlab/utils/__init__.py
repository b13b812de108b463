"""Utilities without knowledge of models: files, locks, records, progress, host copies, versions, text."""
