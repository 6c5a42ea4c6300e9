"""Which keys a query sees: metadata, this package's backend, and what each backend can express."""
