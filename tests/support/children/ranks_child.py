"""The answers of engines with several ranks that serve one checkpoint: a JSON line for each.

python -m tests.support.children.ranks_child MODEL REQUESTS '[ENGINE OPTIONS, ...]'

The file of requests has a list of `{"prompt", "max_tokens", "stop", "options"}`. Each engine gets
all of them at once, then once more, so that prompts come out of the prefix cache.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from tests.support.engine import greedy, settings


def has_window(worker: Any) -> bool:
    """Whether a rank reads two blocks in a step."""
    return worker.model_runner.model_state.slots.window is not None


def held_experts(worker: Any) -> list[int]:
    """How many experts a layer of a rank holds; one number, if all layers agree."""
    named = worker.model_runner.model.named_parameters()
    return sorted({len(weight) for name, weight in named if name.endswith("w13_weight")})


def answers(model: Path, requests: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    """What one engine makes of the requests."""
    from vllm import LLM

    prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
    params = [
        greedy(
            request["max_tokens"],
            ignore_eos=True,
            stop_token_ids=request["stop"],
            **request["options"],
        )
        for request in requests
    ]
    # The checkpoint alone says how long its blocks are.
    if extension := options.get("worker_extension_cls"):
        importlib.import_module(extension.rpartition(".")[0])  # here, too, and not in workers alone
    chosen = settings(0) | {"diffusion_config": None, "disable_log_stats": False} | options
    llm = LLM(model=str(model), **chosen)
    try:
        windows = llm.collective_rpc(has_window)
        held = llm.collective_rpc(held_experts)
        found = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        preempted = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    finally:
        llm.llm_engine.engine_core.shutdown()
    return {
        "answers": [[list(output.outputs[0].token_ids) for output in once] for once in found],
        "two blocks": windows,
        "held experts": held,
        "preemptions": preempted[0],
    }


if __name__ == "__main__":
    import cloudpickle

    # Workers do not have this module, which is the child's `__main__`.
    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    asked = json.loads(Path(sys.argv[2]).read_text())
    for options in json.loads(sys.argv[3]):
        print(json.dumps(answers(Path(sys.argv[1]), asked, options)), flush=True)
        gc.collect()
