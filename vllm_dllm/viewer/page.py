"""One page with everything in it: answers side by side, a slider over the engine's steps.

The page asks nobody for anything: its script and its styles are inside, and a policy in its head
forbids the rest. What models and users wrote reaches it as JSON in ASCII and is only ever set as
text, so that it cannot become markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

_PLACE = "/*TRACES*/"


def page(answers: Iterable[dict[str, Any]]) -> str:
    """The page that shows these answers, see `lines.read_lines`."""
    # Behind `<` a browser could see the end of the script, or a comment.
    data = json.dumps(list(answers), separators=(",", ":")).replace("<", "\\u003c")
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    before, after = template.split(_PLACE)
    return before + data + after
