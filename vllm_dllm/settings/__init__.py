"""All settings and request options: their ranges, their parsing, and their resolution."""
