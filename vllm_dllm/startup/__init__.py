"""Checks and defaults at start-up: vLLM's configuration, limits, quantization schemes."""
