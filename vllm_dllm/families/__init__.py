"""Model families: what a family brings, one folder for each, and the registry that finds them."""
