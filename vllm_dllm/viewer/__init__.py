"""Traces for people: lines of JSON, a page that shows them, and the terminal."""
