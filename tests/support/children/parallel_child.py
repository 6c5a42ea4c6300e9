"""The answers of an engine with several ranks, as JSON: a line for each batch of requests; at last
how often the engine preempted, and how many graphs of our functions each rank's compiler made when
the engine started and in all.

python -m tests.support.children.parallel_child MODEL '[[{"temperature": 0}]]' OPTIONS
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.support.engine import our_graphs, settings


def graphs(worker: Any) -> int:
    """`our_graphs` on a rank."""
    return our_graphs()


if __name__ == "__main__":
    import cloudpickle
    from vllm import LLM

    from tests.support.answers import answers

    # Workers do not have this module, which is the child's `__main__`.
    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    llm = LLM(
        model=sys.argv[1], disable_log_stats=False, **(settings(32) | json.loads(sys.argv[3]))
    )
    made = llm.collective_rpc(graphs)
    for cases in json.loads(sys.argv[2]):
        print(json.dumps(answers(llm, cases)), flush=True)
    preempted = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    print(json.dumps([preempted, made, llm.collective_rpc(graphs)]), flush=True)
