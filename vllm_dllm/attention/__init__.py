"""Which keys a query sees: a batch's metadata, our backend, and what each backend can express."""
