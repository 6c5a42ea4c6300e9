"""Make one self-contained page that shows answers side by side, with a slider over engine steps.

The page contains its answers, or is live and requests them from the server that it came from. It
makes no other requests: its script and styles are inline, and a policy in its head forbids
everything else. Texts reach it as JSON and are only ever set as text, so they cannot become markup.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import Any

_PLACE = "/*TRACES*/"
# What the policy in the page's head says about connections.
_ASKS_NOBODY, _ASKS_ITS_SERVER = "connect-src 'none'", "connect-src 'self'"


def answer_of(name: str, trace: dict[str, Any], text_of: Callable[[int], str]) -> dict[str, Any]:
    """Return the data that a page shows for an answer with a name, as plain values.

    `trace` comes from `Trace.as_json`, and `text_of` returns the text of a token id.
    """
    texts = {str(token): text_of(token) for token in sorted(token_ids(trace["blocks"]))}
    return {"name": name, "texts": texts, "trace": trace}


def token_ids(blocks: Iterable[dict[str, Any]]) -> set[int]:
    """The ids of all tokens in the blocks of a trace, which are plain values."""
    found: set[int] = set()
    for block in blocks:
        found.update(block["tokens"])
        found.update(event["token"] for event in block["events"] if event["token"] is not None)
    return found


def page(answers: Iterable[dict[str, Any]]) -> str:
    """The page that shows these answers, see `answer_of`."""
    # After `<` a browser could see the end of the script, or a comment.
    data = json.dumps(list(answers), separators=(",", ":")).replace("<", "\\u003c")
    before, after = _template().split(_PLACE)
    return before + data + after


@functools.cache
def live_page() -> str:
    """The page that requests answers from its server and contains none itself."""
    before, after = _template().split(_PLACE)
    assert _ASKS_NOBODY in before
    return before.replace(_ASKS_NOBODY, _ASKS_ITS_SERVER) + "null" + after


@functools.cache
def policy(text: str) -> str:
    """The header ``Content-Security-Policy`` of a page, which lets only its own script run."""
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        f"{_ASKS_ITS_SERVER}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _template() -> str:
    return files(__package__).joinpath("page.html").read_text(encoding="utf-8")
