"""Packs whose tokens have classes of their own, under a policy."""
