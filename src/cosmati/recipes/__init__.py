"""Functions that return a frozen run configuration."""
