"""JSON schemas: an algebra of conditions on values, and the languages of what meets them."""
