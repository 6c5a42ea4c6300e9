"""Which keys a query sees: metadata for vLLM's backends, our own backend, and who supports what."""
