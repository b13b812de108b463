"""Studies: published claims, the rules that test them, the result rows, and the verdicts.

study.py (a TOML file) -> run.py (trains, checks, simulates, times, or imports rows) -> rules/ -> judge.py -> view/
"""
