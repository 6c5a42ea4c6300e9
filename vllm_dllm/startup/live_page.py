"""Where the live page of traces can be served: by the one process that takes all requests."""

from __future__ import annotations

from argparse import Namespace

from vllm_dllm.ranges import SettingsError

# What users write behind ``--middleware``.
LIVE_PAGE = "vllm_dllm.viewer.live.LivePage"


def refuse_several_servers(args: Namespace) -> None:
    """Refuse the live page where requests are spread over processes or engines.

    Args:
        args: of the command ``vllm serve``, as the user gave them.

    Raises:
        SettingsError: the page would show a part of the requests; the message names the option.
    """
    if LIVE_PAGE in args.middleware:
        # Unless it is given, vLLM takes the number of replicas for that of servers.
        problem = obstacle(args.api_server_count or 1, args.data_parallel_size)
        if problem is not None:
            raise SettingsError(problem)


def obstacle(api_servers: int, replicas: int) -> str | None:
    """Why a page would not show all requests; None where it would.

    Args:
        api_servers: number of processes that take requests.
        replicas: number of engines, here and on other nodes.
    """
    if replicas > 1:
        cause = f"with --data-parallel-size {replicas} each engine counts its own steps"
    elif api_servers > 1:
        cause = f"with --api-server-count {api_servers} each process knows its own requests only"
    else:
        return None
    return f"--middleware {LIVE_PAGE} shows the requests of one engine, and {cause}; remove one"
