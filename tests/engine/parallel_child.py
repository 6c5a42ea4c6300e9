"""The answers of an engine with several ranks, and how often it preempted, as JSON.

python -m tests.engine.parallel_child MODEL '[{"temperature": 0}]' '{"tensor_parallel_size": 2}'
"""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":
    from vllm import LLM

    from tests.engine.harness import settings
    from tests.engine.test_ranks import answers

    llm = LLM(
        model=sys.argv[1], disable_log_stats=False, **(settings(32) | json.loads(sys.argv[3]))
    )
    print(json.dumps(answers(llm, json.loads(sys.argv[2]))), flush=True)
    preempted = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    print(json.dumps([preempted]), flush=True)
