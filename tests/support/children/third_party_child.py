"""The answers of engines whose model family is an installed package, as JSON: one line for each.

python -m tests.support.children.third_party_child MODEL '[REQUEST, ...]' '[ENGINE OPTIONS, ...]'

A request is `{"prompt", "max_tokens", "threshold", "stop"}`. Each engine gets all of them at once,
and then once more, so that prompts come out of the prefix cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.engine import count_calls, engine, greedy
from tests.support.reference_block_qwen2 import BLOCK


def answers(model: Path, requests: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    """What one engine makes of the requests."""
    params = [
        greedy(
            request["max_tokens"],
            ignore_eos=True,
            stop_token_ids=request["stop"],
            diffusion_threshold=request["threshold"],
        )
        for request in requests
    ]
    prompts = [request["prompt"] for request in requests]
    # The checkpoint alone says how long its canvases are.
    with engine(model, BLOCK, **options | {"diffusion_config": None}) as running:
        preemptions = count_calls(running.scheduler, "_preempt_request")
        twice = [running.generate(prompts, params) for _ in range(2)]
        running.assert_idle()
        return {
            "model": type(running.runner.model).__module__,
            "family": type(running.runner.model_state.family).__module__,
            "answers": [[tokens for tokens, _ in once] for once in twice],
            "preemptions": len(preemptions),
        }


if __name__ == "__main__":
    for chosen in json.loads(sys.argv[3]):
        print(json.dumps(answers(Path(sys.argv[1]), json.loads(sys.argv[2]), chosen)), flush=True)
