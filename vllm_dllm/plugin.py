"""The entry point that vLLM calls in each of its processes."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.dllm")

_registered = False


def register() -> None:
    """Register this package's models with vLLM. This is idempotent and never raises.

    An unsupported version of vLLM is left untouched but for a warning.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from vllm_dllm.vllm_seams import versions

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
    """Do what `register` does, but for any version of vLLM, and raise every error."""
    from vllm_dllm.vllm_seams import registration, request_entry

    registration.register_models()
    registration.adjust_default_limits()
    registration.shut_executors_down()
    request_entry.apply()
