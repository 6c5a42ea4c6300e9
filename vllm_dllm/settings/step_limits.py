"""The limit of the step counts that a request may ask for."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_dllm.decoding import Algorithm
from vllm_dllm.ranges import SettingsError, shown
from vllm_dllm.settings.resolution import PREFIXES, REQUEST, Served


def limit_steps(
    served: Served, algorithm: Algorithm, asked: Mapping[str, float], own: Mapping[str, float]
) -> None:
    """Refuse step counts with which a request would occupy its slot for too long.

    Args:
        served: the server's settings.
        algorithm: the request's algorithm.
        asked: the settings that the request asks for.
        own: the settings that it would get otherwise, which it may always ask for.

    Raises:
        SettingsError: a count exceeds its limit; the message names the setting, the limit, and
            how to raise it.
    """
    for name, allowed in algorithm.config.ranges().items():
        if name not in asked or allowed.blocks is None:
            continue
        default = algorithm.config().values()[name]
        limit = served.settings.request_step_limit or allowed.blocks * served.length
        limit = max(limit, int(own.get(name, default)))
        if asked[name] > limit:
            raise SettingsError(
                f"{PREFIXES[REQUEST]}{name} must be at most {limit} on this server, whose "
                f"blocks have {served.length} positions (dllm.request_step_limit sets another "
                f"limit), got {shown(asked[name])}"
            )
