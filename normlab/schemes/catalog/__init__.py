"""Find schemes by name or by file, and show them: the registry, references, cards and the table."""
