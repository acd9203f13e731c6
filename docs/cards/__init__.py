"""The method cards."""
