"""Thousands of mixed requests under faults, and what must hold afterwards."""
