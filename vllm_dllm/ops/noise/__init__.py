"""Random numbers that depend on a request's seed and position, and on nothing else."""
