"""An engine with a core in another process, that answers one token to each prompt.

python -m tests.support.children.kv_transfer_child MODEL OPTIONS '[[1, 2, 3]]'
"""

from __future__ import annotations

import json
import os
import sys

from tests.support.engine import greedy, settings

if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm import LLM

    options = json.loads(sys.argv[2])
    length = options["diffusion_config"]["canvas_length"]
    llm = LLM(model=sys.argv[1], **(settings(length) | options))
    asked = [{"prompt_token_ids": prompt} for prompt in json.loads(sys.argv[3])]
    done = llm.generate(asked, greedy(1, ignore_eos=True, seed=1), use_tqdm=False)
    print(json.dumps([list(one.outputs[0].token_ids) for one in done]))
