"""Before the first request: checks of vLLM's configuration, default limits, quantization."""
