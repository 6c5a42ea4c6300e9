"""Read JSON schemas, regular expressions, grammars and structural tags as languages."""
