"""Every command of the documentation is run, or is listed in `table` with the reason why not."""
