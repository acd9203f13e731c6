"""Benchmarks: ours and the peers in turns, in one process, with an A/A control. `python -m benchmarks --help`."""
