"""The answers of one engine process whose experts may be spread over ranks, as JSON.

python -m tests.support.children.spread_child MODEL '[{"temperature": 0}]' OPTIONS

Prints the answers, and what `tests.support.spread_experts.Recorder` notes on each rank. With vLLM's
variables of data parallelism in its environment it is one rank of several such processes.
"""

from __future__ import annotations

import json
import sys

from tests.support.engine import settings

if __name__ == "__main__":
    from vllm import LLM

    from tests.support.answers import answers
    from tests.support.spread_experts import spread

    spread()
    options = settings(32) | json.loads(sys.argv[3])
    extension = "tests.support.spread_experts.Recorder"
    llm = LLM(model=sys.argv[1], worker_extension_cls=extension, **options)
    found = answers(llm, json.loads(sys.argv[2]))
    print(json.dumps([found, llm.collective_rpc("experts")]), flush=True)
