"""The wrappers around functions of vLLM, and everything that depends on vLLM's version.

Each module changes one thing that vLLM does for our models, and each wrapper passes every other
model on to the original. `wrapping` has the one helper that wraps.

This package is imported in every process of vLLM, early. So importing its modules imports nothing
of vLLM (`traces` does, and is imported late), and large modules of vLLM that not
every process needs are looked up in `sys.modules`, not imported.
"""

from __future__ import annotations


def apply_all() -> None:
    """Register our models and wrap what they need; a second call changes nothing.

    Raises:
        Exception: whatever keeps the package from working with this vLLM.
    """
    from vllm_dllm.vllm_seams import (
        default_limits,
        registration,
        request_entry,
        worker_shutdown,
    )

    registration.register_models()
    request_entry.apply()
    default_limits.apply()
    worker_shutdown.apply()
