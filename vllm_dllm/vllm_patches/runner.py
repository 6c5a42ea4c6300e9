"""What a model state needs of the process and of the runner that vLLM has made it in.

Called by our model state when the runner makes it. This module is the only one of the package
that the worker imports, so it imports nothing of ours but `wrapping`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm_dllm.vllm_patches.wrapping import with_globals, wrap


def report_preemptions() -> None:
    """Let vLLM's runner tell a model state of ours which requests it preempts.

    The runner calls ``remove_request`` for preempted and for finished requests alike, so before
    them it now calls ``preempt_requests(preempted, finished)`` of a model state that has it.

    The runner's module is looked up, not imported: importing it before vLLM does is not safe (on
    the CPU it must be imported after the kernels were swapped), and a model state exists only
    where the runner has been imported.
    """
    wrap(
        sys.modules["vllm.v1.worker.gpu.model_runner"].GPUModelRunner,
        "finish_requests",
        _name_preempted_requests,
    )


def _name_preempted_requests(original: Callable[..., None]) -> Callable[..., None]:
    def finish_requests(self: Any, scheduler_output: Any) -> None:
        preempt = getattr(self.model_state, "preempt_requests", None)
        if preempt is not None:
            preempt(scheduler_output.preempted_req_ids or (), scheduler_output.finished_req_ids)
        original(self, scheduler_output)

    return finish_requests


def allocate_no_grammar_bitmask() -> None:
    """Keep vLLM's runner from allocating a bitmask for each position of each request's canvas.

    It has room for grammars, which our automata take the place of: 0.6 to 2.1 GiB at vLLM's
    default number of requests. The runner makes its worker for them right after a model state.
    """
    worker = sys.modules["vllm.v1.worker.gpu.structured_outputs"].StructuredOutputsWorker
    wrap(worker, "__init__", _with_empty_bitmask)
    wrap(worker, "apply_grammar_bitmask", _unless_empty)


def _with_empty_bitmask(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, max_num_logits: int, *args: Any, **kwargs: Any) -> None:
        config = sys.modules["vllm.config"].get_current_vllm_config()
        ours = hasattr(config.model_config, "dllm")  # set where our start-up has run
        original(self, 0 if ours else max_num_logits, *args, **kwargs)

    return init


def _unless_empty(original: Callable[..., None]) -> Callable[..., None]:
    def apply_grammar_bitmask(
        self: Any, logits: Any, input_batch: Any, grammar_req_ids: Any, grammar_bitmask: Any
    ) -> None:
        if len(self.grammar_bitmask):
            original(self, logits, input_batch, grammar_req_ids, grammar_bitmask)
        elif (grammar_bitmask != -1).any():  # vLLM's warm-up has one that forbids nothing
            raise RuntimeError("vllm-dllm: a grammar of vLLM's has reached the worker")

    return apply_grammar_bitmask


def load_what_is_compiled() -> None:
    """Let vLLM load a backbone that an earlier start has compiled, on the CPU, too.

    vLLM keeps a compiled model in a file. When it loads one, it calls a method that only models
    compiled by its own backend have. On the CPU PyTorch's backend compiles the whole model, the
    call raises, and every start compiles anew (``docs/upstream/compiled_models_on_the_cpu.md``).
    """
    decorators = sys.modules["vllm.compilation.decorators"]
    wrap(decorators, "_try_load_aot_compiled_fn", _with_complete_functions)


def _with_complete_functions(original: Callable[..., Any]) -> Callable[..., Any]:
    compiler = sys.modules["torch"].compiler

    def load_compiled_function(*args: Any, **kwargs: Any) -> Any:
        loaded = compiler.load_compiled_function(*args, **kwargs)
        function = loaded._artifacts.compiled_fn
        if not hasattr(function, "finalize_loading"):
            function.finalize_loading = lambda vllm_config: None  # it is complete as it is
        return loaded

    torch = SimpleNamespace(compiler=SimpleNamespace(load_compiled_function=load_compiled_function))
    of_ours = with_globals(original, torch=torch)

    def try_load_aot_compiled_fn(model: Any, aot_compilation_path: str) -> Any:
        ours = hasattr(model.vllm_config.model_config, "dllm")  # set where our start-up has run
        return (of_ours if ours else original)(model, aot_compilation_path)

    return try_load_aot_compiled_fn
