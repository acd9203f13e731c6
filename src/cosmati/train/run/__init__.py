"""A run on disk and in time: its folder and lock, its checkpoints, what is due when, and a clean stop."""
