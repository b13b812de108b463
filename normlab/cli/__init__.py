"""The command line: verbs and their options. Nothing here imports torch before a command runs."""
