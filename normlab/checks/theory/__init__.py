"""Theory beside measurements: predicted growth laws, certified bounds, branch Jacobians, the scale test."""
