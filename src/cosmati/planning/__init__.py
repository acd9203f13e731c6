"""What a run will need, before it runs: memory, bytes, time, cost; and what failures leave of it."""
