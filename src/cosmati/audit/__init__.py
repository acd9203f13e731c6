"""What leaves the house: one bundle about a run, and its verification by somebody who has nothing else."""
