"""A vLLM plugin with what vLLM's CPU build lacks for Model Runner V2.

Importing this package imports neither torch nor vLLM.
"""

__version__ = "0.1.0"
