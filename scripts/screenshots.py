"""Make the pictures of both viewers that docs/traces.md shows, from a real server's answers.

    scripts/browser.sh && .venv-browser/bin/python -m scripts.screenshots

The terminal becomes SVG (Rich draws it), and the page PNG (Chromium does).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI

from tests.support.checkpoints import ROOT
from tests.support.server import LIVE_PAGE, Server
from vllm_dllm.viewer.terminal import Screen

CHECKPOINTS = ROOT / "examples" / "tiny" / "checkpoints"
PICTURES = ROOT / "docs" / "img"
TERMINAL, PAGE = "watch.svg", "live_page.png"
MOST_BYTES = 150_000
WATCHED = "count from 31 to 35"
SHOWN = (
    "count from 31 to 35",
    "reverse 52 97 23 61 88 14 70",
    "copy diffusion2026blocks",
    "count from 50 to 54",
    "sort 61 35 88 14",
    "count from 12 to 16",
)


def main() -> None:
    """Serve tiny models, ask them, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", type=Path, default=PICTURES, help="the folder of the pictures")
    folder = parser.parse_args().to
    with serve("tiny-sdar") as server:
        draw_terminal(server, folder / TERMINAL)
    with serve("tiny-llada2", "--middleware", LIVE_PAGE) as server:
        draw_page(server, folder / PAGE)
    for path in (folder / TERMINAL, folder / PAGE):
        size = path.stat().st_size
        assert size < MOST_BYTES, f"{path} has {size} bytes, more than {MOST_BYTES}"
        print(f"{path}: {size} bytes")


@contextlib.contextmanager
def serve(model: str, *flags: str) -> Iterator[Server]:
    """A running server of a tiny model."""
    with tempfile.TemporaryDirectory() as scratch:
        server = Server(CHECKPOINTS / model, *flags, log=Path(scratch, "log"))
        # The environment that has the browser sees the packages of .venv, but not its commands.
        server.command[0] = str(ROOT / ".venv" / "bin" / "vllm")
        with server:
            yield server


def ask(server: Server, question: str) -> dict[str, Any]:
    """The choice of a chat's answer, with its trace."""
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 64, "temperature": 0}
    response = server.post("/v1/chat/completions", **body, vllm_xargs={"diffusion_trace": True})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def draw_terminal(server: Server, path: Path) -> None:
    """What `vllm-dllm watch` prints where its output is not a terminal, in a terminal's colours."""

    @functools.cache
    def text_of(token: int) -> str:
        return str(server.post("/detokenize", tokens=[token]).json()["prompt"])

    with open(os.devnull, "w") as nowhere:
        console = Console(
            file=nowhere, width=76, record=True, color_system="truecolor", highlight=False
        )
        console.print(f'$ vllm-dllm watch tiny-sdar "{WATCHED}"', style="bold", soft_wrap=True)
        screen = Screen(console, text_of)
        for number, block in enumerate(ask(server, WATCHED)["diffusion_trace"]["blocks"]):
            screen.show(number, block)
        screen.end()
    picture = console.export_svg(title="vllm-dllm watch", theme=MONOKAI)
    # A picture that fetches a font from elsewhere would not be shown as it is.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    path.write_text(picture.replace("Fira Code, monospace", "monospace"), encoding="utf-8")


def draw_page(server: Server, path: Path) -> None:
    """The live page with answers to questions that were asked together."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1200, "height": 620})
        tab.goto(f"{server.url}/dllm", wait_until="load")
        with ThreadPoolExecutor(len(SHOWN)) as pool:
            list(pool.map(functools.partial(ask, server), SHOWN))
        tab.wait_for_function(f"() => document.querySelectorAll('article').length === {len(SHOWN)}")
        # The middle of the answers that ran together.
        tab.evaluate(
            "() => { const s = document.getElementById('step'); s.value = Math.round(s.max * .6);"
            " s.dispatchEvent(new Event('input')); }"
        )
        tab.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    main()
