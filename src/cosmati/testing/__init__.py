"""Oracles to test a method of your own against."""
