"""Plain frozen facts, versioned: runs, studies and governance. Standard library only."""
