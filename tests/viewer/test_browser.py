"""The page of traces in headless Chromium, as a file and live with a key; `make test-browser`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import ROOT, TINY_LLADA2
from tests.support.server import LIVE_PAGE, Server
from tests.support.viewer_traces import HOSTILE, trace
from vllm_dllm.viewer.page import answer_of, page

pytestmark = pytest.mark.browser
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or ""
SHOW = "() => [...document.querySelectorAll('.cell')].map(c => [c.className, c.textContent])"
KEY = "the key of this server"
MARKUP = "</script><img src=x onerror=\"document.body.dataset.hacked='yes'\">\x1b[31m"
ALL_DRAWN = "() => +document.getElementById('step').value >= +document.getElementById('step').max"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def watched(browser: Any) -> Any:
    """A tab that notes what it says and whom it asks."""
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    tab.said, tab.asked = [], []
    tab.on("console", lambda message: tab.said.append(message.text))
    tab.on("pageerror", lambda error: tab.said.append(str(error)))
    tab.on("request", lambda request: tab.asked.append(request.url))
    return tab


def opened(browser: Any, path: Path, answer: Any) -> Any:
    """A tab with the page of an answer."""
    path.write_text(page([answer]), encoding="ascii")
    tab = watched(browser)
    tab.goto(path.as_uri(), wait_until="load")
    tab.wait_for_selector("body[data-ready=yes]")
    return tab


def cells_at(tab: Any, step: int) -> list[list[str]]:
    """Classes and text of all cells, with the slider at a step."""
    tab.evaluate(
        "step => { const s = document.getElementById('step'); s.value = step;"
        " s.dispatchEvent(new Event('input')); }",
        step,
    )
    found: list[list[str]] = tab.evaluate(SHOW)
    return found


def test_hostile_text_is_text(browser: Any, tmp_path: Path) -> None:
    name = "<script>document.body.dataset.hacked = 'yes'</script>\x1b[31m\u202e\ud800"
    told = answer_of(name, trace(0, 32, 2, 3), lambda token: HOSTILE.get(token, f"t{token}"))
    tab = opened(browser, tmp_path / "page.html", told)
    assert tab.evaluate("() => document.body.dataset.hacked ?? 'no'") == "no"
    assert tab.locator("script").count() == 2
    assert tab.locator("img").count() == 0
    title = tab.locator("h2").inner_text()
    assert title == "<script>document.body.dataset.hacked = 'yes'</script>\u241b[31m\u00b7\ufffd"
    cells = [text for _, text in cells_at(tab, 99)]
    assert "\u241b[31mred\u241b[0m" in cells, "an escape is shown, not obeyed"
    assert "\u00b7right to left\u00b7" in cells
    assert "\ufffd" in "".join(cells), "half of a surrogate pair"
    assert tab.said == []
    assert [url for url in tab.asked if not url.startswith("file:")] == []


def test_the_slider_shows_each_step(browser: Any, tmp_path: Path) -> None:
    made = trace(0, 8, 1, 3)
    answer = answer_of("q", made, lambda token: f"t{token}")
    tab = opened(browser, tmp_path / "page.html", answer)
    (block,) = made["blocks"]
    cells_at(tab, 0)
    assert tab.locator(".block").is_hidden(), "nothing has begun"
    for step in (1, 2, 3):
        cells = cells_at(tab, step)
        for event in block["events"]:
            kinds, text = cells[event["position"]]
            if event["step"] > step:
                assert "open" in kinds and text == "\u2591"
            else:
                assert text == f"t{event['token']}"
                assert ("now" in kinds) == (event["step"] == step)
                assert ("given" in kinds) == (event["step"] == 0)
        assert f"pass {step} of 4" in tab.locator(".state").inner_text()
    assert "commit" in (cells_at(tab, 4), tab.locator(".state").inner_text())[1]


# ---- live


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("live") / "log"
    made = Server(TINY_LLADA2, "--middleware", LIVE_PAGE, "--api-key", KEY, log=log)
    # The environment that has the browser sees the packages of this one, but not its commands.
    made.command[0] = str(ROOT / ".venv" / "bin" / "vllm")
    with made as running:
        yield running


@pytest.fixture
def tab(server: Server, browser: Any) -> Any:
    opened = watched(browser)
    opened.goto(f"{server.url}/dllm", wait_until="load")
    return opened


def ask(server: Server, **body: Any) -> str:
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
    forced = ask(server, **say(MARKUP), structured_outputs={"choice": [MARKUP]})
    assert forced == MARKUP
    tab.wait_for_function(f"() => document.querySelectorAll('article').length === {before + 2}")
    tab.wait_for_function(ALL_DRAWN)
    texts = tab.locator("article").all_inner_texts()
    assert MARKUP.replace("\x1b", "\u241b") in texts[0], "its prompt; the newest is the first"
    cells = "() => [...document.querySelectorAll('article')].map(a => [...a.querySelectorAll("
    shown = tab.evaluate(cells + "'.cell:not(.given)')].map(c => c.textContent).join(''))")
    assert MARKUP.replace("\x1b", "\u241b") in shown[0]
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
