"""What the ranks of an engine hold, and what it reports of its KV cache, as one line of JSON.

python -m tests.support.children.memory_child MODEL BLOCK '{"tensor_parallel_size": 2}'
"""

from __future__ import annotations

import json
import sys

from tests.support.engine import greedy, settings

if __name__ == "__main__":
    from vllm import LLM

    from tests.support.loaded import cache_report

    llm = LLM(model=sys.argv[1], **(settings(json.loads(sys.argv[2])) | json.loads(sys.argv[3])))
    params = [greedy(4, diffusion_max_steps=1)]
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    print(json.dumps([llm.collective_rpc("held"), cache_report(llm)]), flush=True)
