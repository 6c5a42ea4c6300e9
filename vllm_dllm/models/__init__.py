"""Model classes: weights and forward pass, no request state. Imported lazily by vLLM's registry."""
