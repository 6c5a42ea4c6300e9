"""Errors of vLLM's HTTP server that lack something a client or an operator needs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from vllm_dllm.vllm_patches.wrapping import wrap

_CONNECTOR = "vllm.multimodal.media.connector"


def apply() -> None:
    """Call an unreachable image the client's fault.

    Called once the process has imported vLLM's server.
    """
    connector = sys.modules.get(_CONNECTOR)
    if connector is not None:
        wrap(connector.MediaConnector, "load_from_url_async", _blame_the_url)


def _blame_the_url(original: Callable[..., Any]) -> Callable[..., Any]:
    """Answer 422 where an image cannot be had, for which vLLM partly answers 500 or 501.

    It does so where nobody listens at the address, for a file that the server does not serve
    (``--allowed-local-media-path``) and for a ``data:`` URL that is not base64. Whatever vLLM calls
    the client's fault stays so.
    """
    import aiohttp
    from PIL import UnidentifiedImageError
    from vllm.exceptions import VLLMUnprocessableEntityError

    ours = (OSError, aiohttp.ClientError, asyncio.TimeoutError, RuntimeError, NotImplementedError)

    async def load_from_url_async(self: Any, url: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return await original(self, url, *args, **kwargs)
        except UnidentifiedImageError:
            raise
        except ours as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise VLLMUnprocessableEntityError(
                f"the image (or other medium) cannot be fetched: {reason}; send a URL that this "
                "server can reach, or the content itself as data:image/png;base64,...",
                parameter="image_url",
            ) from error

    return load_from_url_async
