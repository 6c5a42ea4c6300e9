"""What this package relies on in vLLM, and what of it a version of vLLM has changed.

`scan` reads our own source for it, `definitions` reads a vLLM's, and neither is imported: this room
knows only the standard library. The command is ``vllm-dllm compat-report``.
"""
