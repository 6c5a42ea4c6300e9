"""The answers of vLLM's own greedy decoding and of engines with LinearSpec: a JSON line for each.

python -m tests.support.children.linear_spec_child MODEL AUTOREGRESSIVE '[REQUEST, ...]' '[ENGINE OPTIONS, ...]'

Requests are those of `sdar_child`. Each engine gets all of them at once, then once more, so that
prompts come out of the prefix cache, and then every fourth of them alone.
"""  # noqa: E501

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.engine import count_calls, engine, greedy
from tests.support.reference_nemotron import MASK
from tests.support.sdar_requests import parameters


def autoregressive(model: Path, requests: list[dict[str, Any]]) -> list[list[int]]:
    """What vLLM's own class of the backbone answers; the mask is never generated."""
    params = [
        greedy(
            request["max_tokens"],
            ignore_eos=True,
            stop_token_ids=request["stop"],
            logit_bias={MASK: -100.0},
        )
        for request in requests
    ]
    with engine(model, 0, diffusion_config=None) as running:
        found = running.generate([request["prompt"] for request in requests], params)
        return [tokens for tokens, _ in found]


def answers(model: Path, requests: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    """What one engine makes of the requests, and how many passes each token took."""
    params = parameters(requests)
    prompts = [request["prompt"] for request in requests]
    with engine(model, 0, **options | {"diffusion_config": None}) as running:
        preemptions = count_calls(running.scheduler, "_preempt_request")
        passes = count_calls(running.scheduler, "make_spec_decoding_stats")
        found = [running.generate(prompts, params) for _ in range(2)]
        tokens = sum(len(one) for once in found for one, _ in once)
        per_token = len(passes) / tokens
        alone = {
            n: running.generate([prompts[n]], [params[n]])[0][0] for n in range(0, len(prompts), 4)
        }
        running.assert_idle()
        return {
            "answers": [[tokens for tokens, _ in once] for once in found],
            "alone": alone,
            "preemptions": len(preemptions),
            "passes per token": per_token,
        }


if __name__ == "__main__":
    asked = json.loads(sys.argv[3])
    print(json.dumps(autoregressive(Path(sys.argv[2]), asked)), flush=True)
    for chosen in json.loads(sys.argv[4]):
        print(json.dumps(answers(Path(sys.argv[1]), asked, chosen)), flush=True)
