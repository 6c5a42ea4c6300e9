"""The wrappers around functions of vLLM, and everything that depends on vLLM's version.

Each module changes one thing that vLLM does for our models, and each wrapper passes every other
model on to the original. `wrapping` has the one helper that wraps.

This package is imported in every process of vLLM, early. So importing its modules imports nothing
of vLLM (`shutdown` and `traces` do, and are imported late), and large modules of vLLM that not
every process needs are looked up in `sys.modules`, not imported.
"""

from __future__ import annotations


def apply_all() -> None:
    """Register our models and wrap what they need; a second call changes nothing.

    Raises:
        Exception: whatever keeps the package from working with this vLLM.
    """
    from vllm_dllm.vllm_patches import (
        damaged_files,
        default_limits,
        engine_death,
        failed_starts,
        model_inspection,
        nodes,
        registration,
        request_entry,
        sampling_parameters,
    )

    registration.register_models()
    sampling_parameters.apply()
    request_entry.apply()
    default_limits.apply()
    damaged_files.apply()
    engine_death.apply()
    failed_starts.apply()
    model_inspection.apply()
    nodes.apply()
