"""The page of traces in headless Chromium, see `make test-browser`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.viewer_traces import HOSTILE, trace
from vllm_dllm.viewer.page import answer_of, page

pytestmark = pytest.mark.browser
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or ""
SHOW = "() => [...document.querySelectorAll('.cell')].map(c => [c.className, c.textContent])"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Opened:
    """A page in the browser: what it said, whom it asked, and how long it took to be painted."""

    def __init__(self, browser: Any, path: Path, answers: list[Any]) -> None:
        path.write_text(page(answers), encoding="ascii")
        self.tab = browser.new_page(viewport={"width": 1400, "height": 900})
        self.said: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        begin = time.perf_counter()
        self.tab.goto(path.as_uri(), wait_until="load")
        self.tab.wait_for_selector("body[data-ready=yes]")
        # The next frame has been painted when a second one begins.
        self.tab.evaluate(
            "() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"
        )
        self.seconds = time.perf_counter() - begin

    def at(self, step: int) -> list[list[str]]:
        """Classes and text of all cells, with the slider at a step."""
        self.tab.evaluate(
            "step => { const s = document.getElementById('step'); s.value = step;"
            " s.dispatchEvent(new Event('input')); }",
            step,
        )
        found: list[list[str]] = self.tab.evaluate(SHOW)
        return found


def answers(count: int, width: int, blocks: int, steps: int) -> list[Any]:
    texts = HOSTILE.get
    return [
        answer_of(
            f"answer {number}",
            trace(number, width, blocks, steps, wait=number % 3),
            lambda token: texts(token) or f"t{token}",
        )
        for number in range(count)
    ]


def test_hostile_text_is_text(browser: Any, tmp_path: Path) -> None:
    name = "<script>document.body.dataset.hacked = 'yes'</script>\x1b[31m\u202e\ud800"
    told = answer_of(name, trace(0, 32, 2, 3), lambda token: HOSTILE.get(token, f"t{token}"))
    opened = Opened(browser, tmp_path / "page.html", [told])
    assert opened.tab.evaluate("() => document.body.dataset.hacked ?? 'no'") == "no"
    assert opened.tab.locator("script").count() == 2
    assert opened.tab.locator("img").count() == 0
    title = opened.tab.locator("h2").inner_text()
    assert title == "<script>document.body.dataset.hacked = 'yes'</script>\u241b[31m\u00b7\ufffd"
    cells = [text for _, text in opened.at(99)]
    assert "\u241b[31mred\u241b[0m" in cells, "an escape is shown, not obeyed"
    assert "\u00b7right to left\u00b7" in cells
    assert "\ufffd" in "".join(cells), "half of a surrogate pair"
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith("file:")] == []


def test_the_slider_shows_each_step(browser: Any, tmp_path: Path) -> None:
    made = trace(0, 8, 1, 3)
    opened = Opened(browser, tmp_path / "page.html", [answer_of("q", made, lambda t: f"t{t}")])
    (block,) = made["blocks"]
    opened.at(0)
    assert opened.tab.locator(".block").is_hidden(), "nothing has begun"
    for step in (1, 2, 3):
        cells = opened.at(step)
        for event in block["events"]:
            kinds, text = cells[event["position"]]
            if event["step"] > step:
                assert "open" in kinds and text == "\u2591"
            else:
                assert text == f"t{event['token']}"
                assert ("now" in kinds) == (event["step"] == step)
                assert ("given" in kinds) == (event["step"] == 0)
        assert f"pass {step} of 4" in opened.tab.locator(".state").inner_text()
    assert "commit" in (opened.at(4), opened.tab.locator(".state").inner_text())[1]


def test_colours_are_those_of_the_step_or_of_the_probability(browser: Any, tmp_path: Path) -> None:
    made = trace(1, 8, 1, 3)
    opened = Opened(browser, tmp_path / "page.html", [answer_of("q", made, lambda t: f"t{t}")])
    colours = "() => [...document.querySelectorAll('.cell')].map(c => c.style.background)"
    of_step = opened.tab.evaluate(colours)
    opened.tab.select_option("#colour", "probability")
    of_probability = opened.tab.evaluate(colours)
    events = [event for event in made["blocks"][0]["events"] if event["step"]]
    by_step = {event["step"]: of_step[event["position"]] for event in events}
    assert len(set(by_step.values())) == len(by_step) == 3
    for event in events:
        assert of_step[event["position"]] == by_step[event["step"]]
    assert len({of_probability[event["position"]] for event in events}) > 3


def test_play_goes_to_the_end(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, tmp_path / "page.html", answers(1, 8, 1, 2))
    opened.tab.click("#play")
    opened.tab.wait_for_function("() => document.getElementById('play').textContent === 'Play'")
    assert opened.tab.locator("#where").inner_text() == "3 of 3"


def test_many_requests_open_in_two_seconds(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, tmp_path / "page.html", answers(50, 256, 2, 16))
    assert len(opened.at(5)) == 50 * 256 * 2
    assert opened.said == []
    assert opened.seconds < 2, opened.seconds
