"""JSON schemas: an algebra of conditions on values, and the language of the values that meet them."""
