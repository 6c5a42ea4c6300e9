"""The wrappers around functions of vLLM, and everything that depends on vLLM's version.

Each wrapper calls the original for
every other model. `wrapping` has the only helper that wraps.

This package is imported early in every process of vLLM. So its modules import nothing of vLLM when
they are imported (except `http_endpoints`, which only servers import), and look up large modules of
vLLM that not every process needs in `sys.modules` without importing them.
"""

from __future__ import annotations


def apply_all() -> None:
    """Register our models and wrap what they need; a second call changes nothing.

    Raises:
        Exception: something keeps the package from working with this vLLM.
    """
    from vllm_dllm.vllm_seams import registration, request_entry, worker_shutdown

    registration.register_models()
    registration.adjust_default_limits()
    request_entry.apply()
    worker_shutdown.apply()
