"""The start-up of a GPU worker in a CPU worker: profile run, KV cache, warm-up, capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from tests.support.cuda_paths import backends, graphs
from tests.support.cuda_paths.watch import Watch


@contextlib.contextmanager
def cuda_paths(backend: str) -> Iterator[Watch]:
    """Let engines that are started here take the paths of CUDA; everything is undone at the end.

    An engine must have run in this process before: on the CPU, vLLM's runner must not be imported
    until a worker has replaced its Triton kernels.

    Args:
        backend: one of `backends.BACKENDS`.
    """
    from vllm.v1.attention.selector import _cached_get_attn_backend

    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        path = backends.install(backend, watch, patch)
        graphs.install(watch, patch)
        _platform(path, patch)
        _worker(patch)
        _model_state(watch, patch)
        _cached_get_attn_backend.cache_clear()
        try:
            yield watch
        finally:
            _cached_get_attn_backend.cache_clear()


def _platform(backend: str, patch: pytest.MonkeyPatch) -> None:
    """A platform that has graphs and this attention backend."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_keep_sizes(config: Any) -> None:
        sizes = config.compilation_config.cudagraph_capture_sizes
        check(config)
        config.compilation_config.cudagraph_capture_sizes = sizes

    patch.setattr(platform, "check_and_update_config", staticmethod(check_and_keep_sizes))
    patch.setattr(platform, "get_attn_backend_cls", staticmethod(lambda *_, **__: backend))
    patch.setattr(platform, "support_static_graph_mode", staticmethod(lambda: True))
    patch.setattr(platform, "graph_pool_handle", staticmethod(object), raising=False)
    patch.setattr(platform, "_global_graph_pool", None)
    # Attention outside of graphs without a compiler; vLLM calls these graphs breakable.
    patch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")


def _worker(patch: pytest.MonkeyPatch) -> None:
    """The start-up of vLLM's GPU worker, but for what lasts longer than an engine."""
    import vllm.v1.worker.gpu.sample.prompt_logprob as prompt_logprobs
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu import model_runner

    def profile(self: Any) -> int:
        """What a GPU worker runs before it allocates the KV cache."""
        self.model_runner.profile_run()
        self.model_runner.profile_cudagraph_memory()
        return int(self.cache_config.kv_cache_memory_bytes)

    def no_token_ids(tokens: int, *_: Any) -> torch.Tensor:
        # A Triton kernel without a stand-in: requests cannot ask for it, only the warm-up does.
        return torch.zeros(tokens, dtype=torch.int64)

    warm_up = gpu_worker.Worker.compile_or_warm_up_model
    patch.setattr(CPUWorker, "determine_available_memory", profile)
    patch.setattr(CPUWorker, "compile_or_warm_up_model", warm_up)
    patch.setattr(CPUWorker, "_maybe_activate_jit_monitor", lambda self: None)
    patch.setattr(gpu_worker, "freeze_gc_heap", lambda: None)
    patch.setattr(gpu_worker, "enable_gpu_sync_check", lambda: None)
    patch.setattr(model_runner, "lock_workspace", lambda: None)
    patch.setattr(prompt_logprobs, "get_prompt_logprobs_token_ids", no_token_ids)


def _model_state(watch: Watch, patch: pytest.MonkeyPatch) -> None:
    """Tell the watch of every batch that is prepared, for a step or for a capture."""
    from vllm_dllm.worker.model_state import DiffusionModelState

    prepare, inputs, dummy, preempt = (
        DiffusionModelState.prepare_attn,
        DiffusionModelState.prepare_inputs,
        DiffusionModelState.prepare_dummy_inputs,
        DiffusionModelState.preempt_requests,
    )

    def prepare_attn(
        self: Any, batch: Any, mode: CUDAGraphMode, *arguments: Any, **options: Any
    ) -> dict[str, Any]:
        metadata = prepare(self, batch, mode, *arguments, **options)
        if batch.req_ids[0] in self.slot_of:
            watch.prepares(metadata, batch, mode, self)
        else:
            watch.prepares_capture(metadata)
        return metadata

    def prepare_inputs(self: Any, batch: Any, states: Any) -> dict[str, Any]:
        watch.inputs = inputs(self, batch, states)
        return watch.inputs

    def prepare_dummy_inputs(self: Any, requests: int, tokens: int) -> dict[str, Any]:
        watch.inputs = dummy(self, requests, tokens)
        return watch.inputs

    def preempt_requests(self: Any, preempted: Any, finished: Any) -> None:
        watch.preempted += len(preempted)
        preempt(self, preempted, finished)

    patch.setattr(DiffusionModelState, "prepare_attn", prepare_attn)
    patch.setattr(DiffusionModelState, "prepare_inputs", prepare_inputs)
    patch.setattr(DiffusionModelState, "prepare_dummy_inputs", prepare_dummy_inputs)
    patch.setattr(DiffusionModelState, "preempt_requests", preempt_requests)
