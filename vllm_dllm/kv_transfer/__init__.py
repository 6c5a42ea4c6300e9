"""Keys and values of whole prompt pages that leave an engine and enter another."""
