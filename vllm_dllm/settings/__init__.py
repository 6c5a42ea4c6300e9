"""Every setting and request option: ranges, parsing, and what a request gets in the end."""
