"""Studies: published claims, the rules by which runs decide them, the runs' rows, and the verdicts.

study.py (a TOML file) -> run.py (trains, checks, simulates, times, or takes rows) -> rules/ -> judge.py -> report.py
"""
