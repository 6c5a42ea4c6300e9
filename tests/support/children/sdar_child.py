"""The answers of engines that serve an SDAR checkpoint, as JSON: one line for each.

python -m tests.support.children.sdar_child MODEL BLOCK '[REQUEST, ...]' '[ENGINE OPTIONS, ...]'

A request is `{"prompt", "max_tokens", "stop", "options"}`. Each engine gets all of them at once,
then once more, so that prompts come out of the prefix cache, and then each alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.engine import count_calls, engine
from tests.support.sdar_requests import parameters


def answers(
    model: Path, block: int, requests: list[dict[str, Any]], options: dict[str, Any]
) -> dict[str, Any]:
    """What one engine makes of the requests."""
    params = parameters(requests)
    prompts = [request["prompt"] for request in requests]
    # The checkpoint alone says how long its blocks are.
    with engine(model, block, **options | {"diffusion_config": None}) as running:
        preemptions = count_calls(running.scheduler, "_preempt_request")
        found = [running.generate(prompts, params) for _ in range(2)]
        found.append([running.generate([prompts[n]], [params[n]])[0] for n in range(len(prompts))])
        running.assert_idle()
        return {
            "model": type(running.runner.model).__name__,
            "length": running.slots.length,
            "answers": [[tokens for tokens, _ in once] for once in found],
            "preemptions": len(preemptions),
        }


if __name__ == "__main__":
    for chosen in json.loads(sys.argv[4]):
        asked = json.loads(sys.argv[3])
        found = answers(Path(sys.argv[1]), int(sys.argv[2]), asked, chosen)
        print(json.dumps(found), flush=True)
