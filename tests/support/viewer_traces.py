"""Traces that no engine has made: for the viewers' tests."""

from __future__ import annotations

import random
from typing import Any

from vllm_dllm.tracing.trace import Block, Event, Pass, Trace

HOSTILE = {
    1: "<script>document.body.dataset.hacked = 'yes'</script>",
    2: "</script><img src=x onerror=\"document.body.dataset.hacked='yes'\">",
    3: "\x1b[31mred\x1b[0m",
    4: "\u202eright to left\u202c",
    5: "\ud83d",  # half of a surrogate pair
    6: "\u2028",  # ends a line of JavaScript
    7: "<!--",
    8: "",
    9: "&lt;b&gt;",
}


def trace(seed: int, width: int, blocks: int, steps: int, wait: int = 0) -> dict[str, Any]:
    """A masked model's answer: each position is decided in one of the steps."""
    chance, made = random.Random(seed), Trace(prompt_length=3)
    clock = seed % 5
    for number in range(blocks):
        block = Block(number * width, width, given=[0, 1, 2] if number == 0 else [])
        block.events = [Event(0, at, 10 + at, 1.0, 0.0) for at in block.given]
        open_positions = [at for at in range(width) if at not in block.given]
        step_of = {at: chance.randint(1, steps) for at in open_positions}
        step_of[open_positions[-1]] = steps
        for step in range(1, steps + 1):
            clock += 1
            block.passes.append(Pass("denoise", step, clock, 7 * clock))
            for at in open_positions:
                if step_of[at] == step:
                    token, sure = chance.randint(1, 9), chance.random()
                    block.events.append(Event(step, at, token, sure, -0.1))
        for _ in range(wait):
            clock += 1
            block.passes.append(Pass("wait", steps, clock, 7 * clock))
        clock += 1
        block.passes.append(Pass("commit", steps, clock, 7 * clock))
        last = block.deciding()
        block.tokens = [last[at].token or 0 for at in range(width)]
        made.blocks.append(block)
        for at in open_positions:
            made.step_maps.append(step_of[at])
            made.block_indices.append(number)
            made.probabilities.append(last[at].probability or 0.0)
            made.logprobs.append(-0.1)
    return made.as_json()
