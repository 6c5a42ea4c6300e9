"""Model families: the interface of a family, a folder for each, and the registry of all of them."""
