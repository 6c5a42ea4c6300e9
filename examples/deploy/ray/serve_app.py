"""A Ray Serve application around ``vllm serve``: Ray places it, watches it and ends it.

`ray.serve.llm` asks for a version of vLLM of its own (0.29 in Ray 2.60), and this package needs
0.32. So each replica starts the server as a process beside it, and passes requests on as they are.
`rayservice.yaml` imports this file as ``serve_app:build``.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve

START_S = 1800  # weights are downloaded and loaded, kernels compiled
END_S = 140  # --shutdown-timeout of 120 s, and what the server needs to end
# What belongs to one connection, and not to the next one.
OF_A_CONNECTION = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}

app = FastAPI(openapi_url=None)


@serve.deployment
@serve.ingress(app)
class Server:
    """One ``vllm serve`` on this replica's loopback address."""

    def __init__(self, command: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)])
        # As long as a request runs, and as many as come: Ray's max_ongoing_requests is the limit.
        self.client = httpx.AsyncClient(base_url=self.url, timeout=None, limits=httpx.Limits())
        deadline = time.monotonic() + START_S
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise RuntimeError("vllm serve did not start; its log is among this replica's")
            time.sleep(1)

    def healthy(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=10).status_code == 200
        return False

    def check_health(self) -> None:
        """Ray calls this again and again, and replaces a replica for which it raises."""
        if not self.healthy():
            raise RuntimeError("vllm serve is not healthy")

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def pass_on(self, path: str, request: Request) -> StreamingResponse:
        """The server's answer, event by event."""
        headers = {k: v for k, v in request.headers.items() if k not in OF_A_CONNECTION}
        asked = self.client.build_request(
            request.method,
            f"/{path}",
            params=request.query_params,
            headers=headers,
            content=await request.body(),
        )
        answer = await self.client.send(asked, stream=True)

        async def parts() -> Any:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:  # a client that leaves ends its request in the server, too
                await answer.aclose()

        kept = {k: v for k, v in answer.headers.items() if k not in OF_A_CONNECTION}
        return StreamingResponse(parts(), answer.status_code, kept)

    def end(self) -> None:
        """As a container is ended: SIGTERM, and time for what still runs."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.process.kill()

    def __del__(self) -> None:
        """Ray calls it when the replica's requests have ended, or their time is over."""
        if hasattr(self, "process"):
            self.end()


def build(args: dict[str, Any]) -> serve.Application:
    """The application, from the `args` of the Serve configuration."""
    return Server.bind(args["command"])
