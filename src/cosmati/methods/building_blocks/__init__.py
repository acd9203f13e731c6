"""What several methods are built of. It imports no method."""
