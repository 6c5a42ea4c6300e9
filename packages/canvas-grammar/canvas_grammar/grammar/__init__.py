"""JSON schemas, regular expressions and structural tags, all read as regular languages."""
