"""The page of traces, which shows nothing that somebody else wrote, and its middleware."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.viewer_traces import HOSTILE, trace
from vllm_dllm.frontend import FRONT_END
from vllm_dllm.viewer.live import LivePage
from vllm_dllm.viewer.page import answer_of, live_page, page, policy


def told(name: str = "a question") -> dict[str, Any]:
    return answer_of(name, trace(0, 8, 2, 3), lambda token: HOSTILE.get(token, f"t{token}"))


def test_hostile_text_does_not_become_markup() -> None:
    name = "<script>alert(1)</script> \x1b[31m \ud800"
    text = page([told(name)])
    text.encode("ascii")
    assert text.count("<script") == 2, "the data and the page's own"
    assert text.count("</script") == 2
    assert "<img" not in text and "<!--" not in text.replace("<!doctype", "")
    data = re.search(r'id="traces">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])[0]["name"] == name


def test_the_page_asks_nobody() -> None:
    text = page([told()])
    assert "default-src 'none'" in text
    elsewhere = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert elsewhere == {"http://www.w3.org/2000/svg"}, "the name of SVG, which is not fetched"
    assert "innerHTML" not in text


def test_the_live_page_asks_its_server_alone() -> None:
    text = live_page()
    text.encode("ascii")
    assert "connect-src 'self'" in text and "connect-src 'none'" not in text
    assert "connect-src 'none'" in page([]), "a file asks nobody at all"
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy(text), "no other script runs"
    assert "Storage" not in script and "cookie" not in script, "the key is kept in memory"


# ---- the middleware


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
