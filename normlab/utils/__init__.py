"""General utilities: files, locks, JSON records, progress, host copies, versions, lazy imports."""
