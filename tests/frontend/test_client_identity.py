"""Who a request comes from, as vLLM's server and as Ray Serve LLM hand it over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request

from vllm_dllm.constraints.service.turns import NOBODY
from vllm_dllm.frontend.client_identity import client_of

ADDRESS = "192.0.2.7"
HEADERS = [(b"authorization", b"Bearer one")]


def request(**more: Any) -> Request:
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": HEADERS}
    return Request(scope | more)


def served(api_key: list[str] | None) -> Request:
    app = Starlette()
    app.state.args = SimpleNamespace(api_key=api_key)
    return request(app=app, client=(ADDRESS, 5))


def test_a_checked_key_is_the_client() -> None:
    key, address = client_of(["a chat", served(["one"])])
    assert address == ADDRESS and len(key) == 16


def test_without_checks_the_address_is_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    address, key = client_of([served(None)])
    assert address == ADDRESS and len(key) == 16


def test_ray_hands_over_headers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No app and no address; a key of the environment was checked by nobody."""
    monkeypatch.setenv("VLLM_API_KEY", "one")
    address, key = client_of([request()])
    assert address == "" and len(key) == 16


def test_a_call_without_a_request() -> None:
    assert client_of(["a chat"]) == NOBODY
