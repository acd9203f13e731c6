"""The `cosmati` command."""
