"""The traces of mixed requests by an engine with several ranks, as a line of JSON.

python -m tests.support.children.trace_child FAMILY COUNT '{"tensor_parallel_size": 2}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.support.checkpoints import TEXT_ONLY_OPTIONS
from tests.support.engine import settings
from tests.support.mixed_requests import FAMILIES, completions, mixed

Told = list[list[tuple[list[int], dict[str, Any]]]]


def told(running: Any, family: str, count: int) -> Told:
    """Tokens and trace of every answer to every request."""
    found = completions(running, list(mixed(family, count)), {"diffusion_trace": True})
    return [[(list(o.token_ids), o.diffusion_trace.as_json()) for o in each] for each in found]


if __name__ == "__main__":
    from types import SimpleNamespace

    from vllm import LLM

    family, count, options = (json.loads(argument) for argument in sys.argv[1:4])
    path, length, _, _ = FAMILIES[family]
    text_only = TEXT_ONLY_OPTIONS if family == "gemma" else {}
    llm = LLM(model=str(path), **(settings(length) | text_only | options))
    print(json.dumps(told(SimpleNamespace(llm=llm), family, count)), flush=True)
