"""What lies under everything that is kept: Merkle trees, atomic writes, locks. Standard library only."""
