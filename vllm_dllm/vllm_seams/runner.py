"""Change what a model state needs changed in its process and in the runner that made it.

Our model state calls these functions when the runner makes it. This module is the only one of the
room that the worker imports, so it imports nothing of ours except `wrapping`. Modules of vLLM are
looked up: importing the runner before vLLM does is not safe (on the CPU it must be imported after
the kernels were swapped), and a model state exists only where the runner has been imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm_dllm.vllm_seams.wrapping import wrap


def report_preemptions() -> None:
    """Make vLLM's runner report to one of our model states which requests it preempts.

    The runner calls ``remove_request`` for preempted and finished requests alike. It also hands
    over its CUDA graphs, which it makes after the model state.
    """
    runner = sys.modules["vllm.v1.worker.gpu.model_runner"].GPUModelRunner
    wrap(runner, "finish_requests", _name_preempted_requests)


def _name_preempted_requests(
    original: Callable[..., None], self: Any, scheduler_output: Any
) -> None:
    preempt = getattr(self.model_state, "preempt_requests", None)
    if preempt is not None:
        self.model_state.graphs = self.cudagraph_manager
        preempt(scheduler_output)
    original(self, scheduler_output)


def allocate_no_grammar_bitmask() -> None:
    """Keep vLLM's runner from allocating a bitmask for each position of each request's canvas.

    The bitmasks are for grammars, which our automata replace, and take 0.6 to 2.1 GiB at vLLM's
    default number of requests. The runner makes its worker for them right after a model state.
    """
    worker = sys.modules["vllm.v1.worker.gpu.structured_outputs"].StructuredOutputsWorker
    wrap(worker, "__init__", _with_empty_bitmask)


def _with_empty_bitmask(
    original: Callable[..., None], self: Any, max_num_logits: int, *args: Any, **kwargs: Any
) -> None:
    config = sys.modules["vllm.config"].get_current_vllm_config()
    ours = hasattr(config.model_config, "dllm")  # our start-up sets it
    original(self, 0 if ours else max_num_logits, *args, **kwargs)
    if ours:
        self.apply_grammar_bitmask = _refuse_grammars


def _refuse_grammars(
    logits: Any, input_batch: Any, grammar_req_ids: Any, grammar_bitmask: Any
) -> None:
    if (grammar_bitmask != -1).any():  # vLLM's warm-up passes one that forbids nothing
        raise RuntimeError("vllm-dllm: a grammar of vLLM's has reached the worker")
