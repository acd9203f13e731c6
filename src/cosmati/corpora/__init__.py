"""Corpora that need no download: Python source of this machine, and handwritten digits."""
