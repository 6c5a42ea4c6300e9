"""Random numbers that depend only on a request's seed and position."""
