"""Constraints are compiled in separate processes, and clients take turns."""
