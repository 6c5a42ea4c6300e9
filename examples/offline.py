"""Offline generation, as with any other model of vLLM.

.venv/bin/python examples/offline.py inclusionAI/LLaDA2.0-mini
"""

from __future__ import annotations

import sys

from vllm import LLM


def main() -> None:
    llm = LLM(
        model=sys.argv[1],
        max_model_len=2048,
        additional_config={"dllm": {"threshold": 0.9}},
    )
    # The model's own recommendation: greedy. `SamplingParams()` alone would mean temperature 1.
    params = llm.get_default_sampling_params()
    params.max_tokens = 128
    params.extra_args = {"diffusion_threshold": 0.95}  # this request only
    for output in llm.chat([{"role": "user", "content": "Name three rivers."}], params):
        print(output.outputs[0].text)


if __name__ == "__main__":
    main()
