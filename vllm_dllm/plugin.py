"""The entry point that vLLM calls in each of its processes."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.dllm")

_registered = False


def register() -> None:
    """Register our models with vLLM. Idempotent; never raises, never harms other models.

    On a vLLM that this package does not know nothing is touched: one warning, and only a
    diffusion model is then refused (by vLLM, as an unknown architecture).
    """
    global _registered
    if _registered:
        return
    _registered = True
    from vllm_dllm.vllm_patches import compat

    problem = compat.version_problem()
    if problem is not None:
        logger.warning("vllm-dllm is inactive: %s", problem)
        return
    try:
        install()
    except Exception:
        # An exception here would stop every model on the server.
        logger.exception("vllm-dllm is inactive: it could not register")


def install() -> None:
    """Everything that `register` does, errors included."""
    from vllm_dllm.cpu import bridge
    from vllm_dllm.vllm_patches import compat

    bridge.install(compat.is_diffusion)
    compat.register_models()
    compat.patch_sampling_validation()
    compat.patch_default_budgets()
    compat.patch_async_scheduling()
    compat.patch_damaged_files()
    compat.patch_engine_death()
