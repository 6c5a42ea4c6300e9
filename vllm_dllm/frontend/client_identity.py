"""Who sent an HTTP request, so that clients can take turns with their constraints."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from vllm_dllm.constraints.service.turns import NOBODY, Client


def client_of(handler_arguments: list[Any]) -> Client:
    """Who sent the request that a handler of vLLM's HTTP server is called for.

    Where the server checks API keys, a client is a key, and the addresses that use it take turns
    among themselves. Elsewhere a client is an address, and the keys that it shows, which may be
    invented, take turns among themselves.

    Args:
        handler_arguments: what the handler is called with. Starlette's request is among it if the
            request came over HTTP; else the client is `NOBODY`.
    """
    for argument in handler_arguments:
        if hasattr(argument, "client") and hasattr(argument, "headers"):
            address = argument.client.host if argument.client else ""
            shown = argument.headers.get("authorization", "").encode(errors="replace")
            key = hashlib.sha256(shown).hexdigest()[:16] if shown else ""
            return (key, address) if keys_are_checked(argument) else (address, key)
    return NOBODY


def keys_are_checked(request: Any) -> bool:
    """Whether vLLM's HTTP server has checked the API key of a request.

    Ray Serve LLM calls the handlers with requests that came to no such server: they have no app.
    """
    app = request.scope.get("app")
    if app is None:
        return False
    api_keys = getattr(getattr(app.state, "args", None), "api_key", None)
    return any(api_keys or [os.environ.get("VLLM_API_KEY")])
