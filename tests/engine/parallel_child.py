"""The answers of an engine with two tensor-parallel ranks, printed as JSON.

python -m tests.engine.parallel_child MODEL '[{"temperature": 0}, ...]'
"""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":
    from vllm import LLM

    from tests.engine.harness import settings
    from tests.engine.test_tensor_parallel import answers

    llm = LLM(model=sys.argv[1], tensor_parallel_size=2, **settings(32))
    print(json.dumps(answers(llm, json.loads(sys.argv[2]))), flush=True)
