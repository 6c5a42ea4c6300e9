"""Check that one process and one engine take all requests, as the live page requires."""

from __future__ import annotations

# The value that users pass to ``--middleware``.
LIVE_PAGE = "vllm_dllm.viewer.live.LivePage"


def obstacle(api_servers: int, replicas: int) -> str | None:
    """Why a page would not show all requests; None if it would.

    Args:
        api_servers: number of processes that take requests.
        replicas: number of engines on this and other nodes.
    """
    if replicas > 1:
        cause = f"with --data-parallel-size {replicas} each engine counts its own steps"
    elif api_servers > 1:
        cause = f"with --api-server-count {api_servers} each process knows its own requests only"
    else:
        return None
    return f"--middleware {LIVE_PAGE} shows the requests of one engine, and {cause}; remove one"
