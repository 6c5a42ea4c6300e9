"""The entry point that vLLM calls in each of its processes."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.dllm")

_registered = False


def register() -> None:
    """Register our models with vLLM. Idempotent; never raises, never harms other models.

    A version of vLLM that this package does not support is left untouched: there is one warning,
    and vLLM refuses our models, as unknown architectures, and no others.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from vllm_dllm.vllm_patches import versions

    problem = versions.version_problem()
    if problem is not None:
        logger.warning("vllm-dllm is inactive: %s", problem)
        return
    try:
        install()
    except Exception:
        # An exception here would stop every model on the server.
        logger.exception("vllm-dllm is inactive: it could not register")


def install() -> None:
    """Do what `register` does, but for any version of vLLM, and raise what goes wrong."""
    from vllm_dllm import vllm_patches

    vllm_patches.apply_all()
