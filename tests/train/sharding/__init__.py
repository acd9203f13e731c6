"""What ranks share out, and that no bit tells."""
