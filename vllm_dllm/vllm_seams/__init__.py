"""The wrappers around functions of vLLM, and everything that depends on vLLM's version.

Each wrapper calls the original for every other model. `wrapping` has the only helper that wraps.

`plugin` imports this package early in every process of vLLM. So its modules import nothing of vLLM
(but for those that are imported later themselves), and look up large modules of vLLM that not every
process needs in `sys.modules`.
"""
