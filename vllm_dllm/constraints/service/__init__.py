"""Constraints are compiled in processes of their own, clients in turn."""
