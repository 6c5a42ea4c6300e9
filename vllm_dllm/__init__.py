"""Serve block-diffusion language models on stock vLLM.

Importing this package is free: it loads neither torch nor vLLM. vLLM calls
:func:`vllm_dllm.plugin.register` through the entry point ``vllm.general_plugins``.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
