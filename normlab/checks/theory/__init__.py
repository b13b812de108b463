"""Theory of a model beside its measurements: growth laws, certified bounds, Jacobians, the scale test."""
