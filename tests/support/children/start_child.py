"""Start an engine as users do, with everything compiled, and print what it answers.

python -m tests.support.children.start_child MODEL
"""

from __future__ import annotations

import json
import sys

from tests.support.checkpoints import TINY

PROMPTS = ("64 + 28", "sort 61 35 88 14", "reverse 52 97 23 71 40", "copy diffusion2026")


def main(model: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(str(TINY / model), max_model_len=256, kv_cache_memory_bytes=1 << 26)
    asked = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    answers = [
        [list(output.outputs[0].token_ids) for output in llm.chat(asked, params, use_tqdm=False)]
        for params in (
            SamplingParams(temperature=0, max_tokens=40),
            SamplingParams(temperature=1, seed=7, max_tokens=40),
        )
    ]
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
