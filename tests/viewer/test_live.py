"""The middleware of the live page by itself: what it passes on, and when it has nothing to show."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dllm.frontend import FRONT_END
from vllm_dllm.viewer.live import LivePage


class Application:
    """What is behind the middleware; notes which requests reach it."""

    def __init__(self, api_servers: int = 1, replicas: int = 1, ours: bool = True) -> None:
        parallel = SimpleNamespace(_api_process_count=api_servers, data_parallel_size=replicas)
        self.front_end = SimpleNamespace(traces_all=False)
        inputs = SimpleNamespace(tokenizer=None, **({FRONT_END: self.front_end} if ours else {}))
        client = SimpleNamespace(
            vllm_config=SimpleNamespace(parallel_config=parallel),
            input_processor=inputs,
            output_processor=SimpleNamespace(request_states={}),
        )
        self.state = SimpleNamespace(args=SimpleNamespace(api_key=None), engine_client=client)
        self.reached: list[Any] = []
        self.page = LivePage(self)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.reached.append(scope.get("path", scope["type"]))

    def call(self, path: str = "/dllm/traces", **more: Any) -> tuple[int | None, bytes]:
        """Status and body; None for the status where the request was passed on."""
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "app": self, "method": "GET", "path": path, "headers": []} | more
        asyncio.run(self.page(scope, None, send))
        return (sent[0]["status"], sent[1]["body"]) if sent else (None, b"")


def test_every_request_is_traced_from_the_first_call_on() -> None:
    application = Application()
    assert application.call(type="lifespan")[0] is None
    assert application.front_end.traces_all
    status, body = application.call()
    assert status == 200
    assert json.loads(body)["kept"] == []


@pytest.mark.parametrize("path", ["/", "/v1/models", "/dllm/more", "/dllmx", "/x/dllm"])
def test_all_else_is_passed_on(path: str) -> None:
    application = Application()
    assert application.call(path)[0] is None
    assert application.call("/dllm", type="websocket")[0] is None
    assert application.reached == [path, "/dllm"]


def test_a_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of the environment")
    application = Application()
    assert application.call()[0] == 401
    held = [(b"authorization", b"Bearer of the environment")]
    assert application.call(headers=held)[0] == 200
    assert application.call(path="/dllm")[0] == 200


@pytest.mark.parametrize(
    ("application", "reason"),
    [
        (Application(ours=False), "vllm-dllm does not serve the model of this server"),
        (Application(api_servers=2), "--api-server-count 2"),
        (Application(replicas=2), "--data-parallel-size 2"),
    ],
)
def test_where_there_is_nothing_to_show_the_page_says_why(
    application: Application, reason: str
) -> None:
    status, body = application.call()
    assert status == 409
    assert reason in json.loads(body)["error"]
    assert not application.front_end.traces_all
    assert application.call("/v1/models")[0] is None, "the server serves on"
