"""One page with everything in it: answers side by side, a slider over the engine's steps.

The page has its answers in it, or is live and asks the server that it came from. It asks nobody
else for anything: its script and its styles are inside, and a policy in its head forbids the rest.
What models and users wrote reaches it as JSON and is only ever set as text, so that it cannot
become markup.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

_PLACE = "/*TRACES*/"
# What the policy in the page's head says of connections.
_ASKS_NOBODY, _ASKS_ITS_SERVER = "connect-src 'none'", "connect-src 'self'"


def page(answers: Iterable[dict[str, Any]]) -> str:
    """The page that shows these answers, see `lines.read_lines`."""
    # Behind `<` a browser could see the end of the script, or a comment.
    data = json.dumps(list(answers), separators=(",", ":")).replace("<", "\\u003c")
    before, after = _template().split(_PLACE)
    return before + data + after


@functools.cache
def live_page() -> str:
    """The page that asks its server for answers; there are none in it."""
    before, after = _template().split(_PLACE)
    assert _ASKS_NOBODY in before
    return before.replace(_ASKS_NOBODY, _ASKS_ITS_SERVER) + "null" + after


@functools.cache
def policy(text: str) -> str:
    """The header ``Content-Security-Policy`` of a page: nothing runs but the script in it."""
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        f"{_ASKS_ITS_SERVER}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _template() -> str:
    return files(__package__).joinpath("page.html").read_text(encoding="utf-8")
