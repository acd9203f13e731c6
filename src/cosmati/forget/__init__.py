"""Deletion: what there is of somebody or something, and how a model is rid of it."""
