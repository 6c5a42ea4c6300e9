"""Who has sent a request, for the order in which constraints are compiled; and that it is used."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import TINY_LLADA2
from tests.support.server import Server
from vllm_dllm.frontend.http_server import client_of

pytestmark = pytest.mark.e2e

KEYS = ("a first key", "a second key")


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


@pytest.mark.slow
def test_a_flood_is_not_felt_with_another_key(tmp_path: Path) -> None:
    """Catches a server that refused everybody's new constraints while one client flooded it."""

    def ask(key: str, regex: str) -> httpx.Response:
        body = {
            "model": "m",
            "prompt": "a",
            "max_tokens": 30,
            "structured_outputs": {"regex": regex},
        }
        header = {"Authorization": f"Bearer {key}"}
        url = f"{server.url}/v1/completions"
        return httpx.post(url, json=body, headers=header, timeout=60)

    with Server(TINY_LLADA2, "--api-key", *KEYS, log=tmp_path / "log") as server:
        assert ask(KEYS[1], "begin [0-9]").status_code == 200
        with ThreadPoolExecutor(30) as pool:
            flood = [pool.submit(ask, KEYS[0], f"(a|b)*a(a|b){{26}}c{{{n}}}") for n in range(1, 31)]
            time.sleep(2)
            for n in range(3):
                began = time.monotonic()
                answer = ask(KEYS[1], f"other {n} [0-9]")
                assert answer.status_code == 200, answer.text
                assert time.monotonic() - began < 8
            assert {one.result().status_code for one in flood} <= {400, 503}
