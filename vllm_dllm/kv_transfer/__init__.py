"""Move keys and values of whole prompt pages from one engine to another."""
