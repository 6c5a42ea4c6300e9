"""What vLLM's CPU build lacks for Model Runner V2; a plugin of vLLM.

Importing this package imports neither torch nor vLLM.
"""

__version__ = "0.1.0"
