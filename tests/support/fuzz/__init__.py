"""Hostile bodies for every endpoint of a server, and what may come back for them."""
