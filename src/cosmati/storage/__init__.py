"""What lies under everything that is kept: Merkle trees, atomic writes, locks, and DuckDB.

The standard library is enough, but for DuckDB, which is loaded where it's asked for.
"""
