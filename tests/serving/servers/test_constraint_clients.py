"""Who has sent a request, for the order in which constraints are compiled; and that it is used."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.serving.servers.conftest import KEYS
from tests.support.server import Server
from vllm_dllm.frontend.http_server import client_of

pytestmark = pytest.mark.e2e


def scope(keys: list[str] | None, sent: str = "", client: Any = ("10.0.0.1", 9)) -> dict[str, Any]:
    headers = [(b"authorization", sent.encode())] if sent else []
    state = SimpleNamespace(args=SimpleNamespace(api_key=keys))
    return {
        "type": "http",
        "headers": headers,
        "client": client,
        "app": SimpleNamespace(state=state),
    }


def test_clients_are_known_by_their_keys_or_their_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert client_of(scope([*KEYS], f"Bearer {KEYS[1]}")) == KEYS[1]
    assert client_of(scope(None)) == client_of(scope([*KEYS])) == "10.0.0.1"
    # Nobody becomes many clients by inventing keys.
    assert client_of(scope(None, "Bearer x")) == client_of(scope([*KEYS], "Bearer x")) == "10.0.0.1"
    assert client_of(scope(None, client=None)) == "", "a Unix socket has no address"
    monkeypatch.setenv("VLLM_API_KEY", "from the environment")
    assert client_of(scope(None, "Bearer from the environment")) == "from the environment"


def slow(n: int) -> dict[str, str]:
    return {"regex": f"(a|b)*a(a|b){{26}}c{{{n + 1}}}"}


def flood(server: Server, n: int) -> httpx.Response:
    """One of many requests, by all ways in turn, whose constraint takes too long."""
    wanted = {"max_tokens": 30, "structured_outputs": slow(n)}
    schema = {"type": "string", "pattern": f"^{slow(n)['regex']}$"}
    text = {"format": {"type": "json_schema", "name": "r", "schema": schema}}
    path, ask = [
        ("completions", {"prompt": "a"} | wanted),
        ("chat/completions", {"messages": [{"role": "user", "content": "Who?"}]} | wanted),
        ("responses", {"input": "Who?", "text": text}),
    ][n % 3]
    return post(server, KEYS[0], f"/v1/{path}", **ask, stream=n % 2 == 1)


def post(server: Server, key: str, path: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return server.client.post(path, json={"model": "m"} | body, headers=headers)


@pytest.mark.slow
def test_slow_constraints_hold_up_nobody_else(watched: Server) -> None:
    """Nor what is compiled. What is new waits, and who must wait for too long hears of it."""

    def timed(seconds: float, key: str, **constraint: Any) -> None:
        begin = time.monotonic()
        body = {"prompt": "a", "max_tokens": 30} | constraint
        response = post(watched, key, "/v1/completions", **body)
        assert response.status_code == 200, response.text
        assert time.monotonic() - begin < seconds

    known = {"structured_outputs": {"regex": "known [0-9]"}}
    timed(60, KEYS[0], **known)
    with ThreadPoolExecutor(24) as pool:
        sent = [pool.submit(flood, watched, n) for n in range(24)]
        time.sleep(1)
        timed(4, KEYS[0])
        timed(4, KEYS[0], **known)
        for n in range(2):
            timed(8, KEYS[1], structured_outputs={"regex": f"other {n} [0-9]"})
        answers = [one.result() for one in sent]
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {400, 503}
    # All are from one client, and each is compiled on its own by one of two processes.
    for answer in answers:
        error = answer.json()["error"]
        assert error["code"] == answer.status_code
        if answer.status_code == 400:
            assert "more than 512 MiB" in error["message"]
        else:
            assert error["type"] == "Service Unavailable"
            assert re.search(": .* busy, try again", error["message"])
    refused = codes.index(400)
    begin = time.monotonic()
    assert flood(watched, refused).status_code == 400
    assert time.monotonic() - begin < 1, "what is too slow is known to be"
    watched.wait_until_idle()
