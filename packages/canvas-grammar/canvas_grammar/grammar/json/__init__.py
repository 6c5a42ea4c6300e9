"""Read JSON schemas, with an algebra of conditions on values and the languages that meet them."""
