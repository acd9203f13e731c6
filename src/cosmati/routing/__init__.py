"""Which regions of a model learn from which data: regions, policies, routes."""
