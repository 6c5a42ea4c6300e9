"""The live page in headless Chromium, with a real server and its key; see `make test-browser`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import ROOT, TINY_LLADA2
from tests.support.server import LIVE_PAGE, Server

pytestmark = pytest.mark.browser
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or ""
KEY = "the key of this server"
HOSTILE = "</script><img src=x onerror=\"document.body.dataset.hacked='yes'\">\x1b[31m"
ALL_DRAWN = "() => +document.getElementById('step').value >= +document.getElementById('step').max"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("live") / "log"
    made = Server(TINY_LLADA2, "--middleware", LIVE_PAGE, "--api-key", KEY, log=log)
    # The environment that has the browser sees the packages of this one, but not its commands.
    made.command[0] = str(ROOT / ".venv" / "bin" / "vllm")
    with made as running:
        yield running


@pytest.fixture
def tab(server: Server) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1400, "height": 900})
        opened.said, opened.asked = [], []
        opened.on("console", lambda message: opened.said.append(message.text))
        opened.on("pageerror", lambda error: opened.said.append(str(error)))
        opened.on("request", lambda request: opened.asked.append(request.url))
        opened.goto(f"{server.url}/dllm", wait_until="load")
        yield opened
        browser.close()


def ask(server: Server, **body: Any) -> str:
    """The text of a chat's answer."""
    body = {"model": "m", "max_tokens": 100, "temperature": 0} | body
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{server.url}/v1/chat/completions"
    response = httpx.post(url, json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def give(tab: Any, key: str) -> None:
    tab.wait_for_selector("#access:not([hidden])")
    tab.fill("#key", key)
    tab.press("#key", "Enter")


def say(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_nothing_without_the_key(tab: Any, server: Server) -> None:
    ask(server, **say("12 + 5"))
    give(tab, "another key")
    tab.wait_for_function("() => document.getElementById('note').textContent.includes('know')")
    assert tab.locator("article").count() == 0
    # A key that no header can carry is a mistake like another.
    give(tab, "\u20ac")
    tab.wait_for_function("() => document.getElementById('note').className === 'bad'")
    assert tab.locator("article").count() == 0


def test_requests_appear_as_text_without_a_reload(tab: Any, server: Server) -> None:
    give(tab, KEY)
    tab.wait_for_selector("#access[hidden]", state="attached")
    before = tab.locator("article").count()
    answer = ask(server, **say("sort 61 35 88 14 27 93"))
    forced = ask(server, **say(HOSTILE), structured_outputs={"choice": [HOSTILE]})
    assert forced == HOSTILE
    tab.wait_for_function(f"() => document.querySelectorAll('article').length === {before + 2}")
    tab.wait_for_function(ALL_DRAWN)
    texts = tab.locator("article").all_inner_texts()
    assert HOSTILE.replace("\x1b", "\u241b") in texts[0], "its prompt; the newest is the first"
    cells = "() => [...document.querySelectorAll('article')].map(a => [...a.querySelectorAll("
    shown = tab.evaluate(cells + "'.cell:not(.given)')].map(c => c.textContent).join(''))")
    assert HOSTILE.replace("\x1b", "\u241b") in shown[0]
    assert answer in shown[1]
    assert tab.evaluate("() => document.body.dataset.hacked ?? 'no'") == "no"
    assert tab.locator("img").count() == 0
    assert tab.locator("script").count() == 2
    assert [text for text in tab.said if "401" not in text] == []
    assert {url.split("?")[0] for url in tab.asked} <= {
        f"{server.url}/dllm",
        f"{server.url}/dllm/traces",
    }
    assert KEY not in "".join([tab.url, *tab.asked])
    assert tab.evaluate("() => [sessionStorage.length, localStorage.length]") == [0, 0]


def test_the_slider_stays_where_it_is_put(tab: Any, server: Server) -> None:
    give(tab, KEY)
    ask(server, **say("sort 61 35 88 14"))
    tab.wait_for_selector("article")
    tab.wait_for_function(ALL_DRAWN)
    tab.evaluate(
        "() => { const s = document.getElementById('step'); s.value = 1;"
        " s.dispatchEvent(new Event('input')); }"
    )
    before = tab.locator("article").count()
    ask(server, **say("12 + 5"))
    tab.wait_for_function(f"() => document.querySelectorAll('article').length === {before + 1}")
    assert tab.evaluate("() => document.getElementById('step').value") == "1"
