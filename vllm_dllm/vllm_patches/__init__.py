"""Every function of vLLM that is wrapped, and the one place that knows vLLM's versions."""
