"""The start-up of a GPU worker in a CPU worker: profile run, KV cache, warm-up, capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from tests.support.cuda_paths import backends, graphs
from tests.support.cuda_paths.backends import Backend
from tests.support.cuda_paths.watch import Watch
from vllm_dllm.attention.routes import Device, ModelAttention, Options, Route


@contextlib.contextmanager
def cuda_paths(backend: Backend) -> Iterator[Watch]:
    """Let engines that are started here take the paths of CUDA; everything is undone at the end.

    An engine must have run in this process before: on the CPU, vLLM's runner must not be imported
    until a worker has replaced its Triton kernels.

    Args:
        backend: the one that is going to be chosen with ``--attention-backend``.
    """
    from vllm.v1.attention.selector import _cached_get_attn_backend

    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        backends.install(backend, watch, patch)
        graphs.install(watch, patch)
        _platform(patch)
        _routes(backend, patch)
        _worker(watch, patch)
        _model_state(watch, patch)
        _cached_get_attn_backend.cache_clear()
        try:
            yield watch
        finally:
            _cached_get_attn_backend.cache_clear()


def _platform(patch: pytest.MonkeyPatch) -> None:
    """A platform that has graphs and the attention backends of CUDA."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_keep(config: Any) -> None:
        sizes = config.compilation_config.cudagraph_capture_sizes
        warms_up = config.kernel_config.enable_jit_warmup
        check(config)
        config.compilation_config.cudagraph_capture_sizes = sizes
        config.kernel_config.enable_jit_warmup = warms_up

    patch.setattr(platform, "check_and_update_config", staticmethod(check_and_keep))
    patch.setattr(
        platform, "get_attn_backend_cls", staticmethod(lambda chosen, *_, **__: chosen.get_path())
    )
    patch.setattr(platform, "support_static_graph_mode", staticmethod(lambda: True))
    patch.setattr(platform, "graph_pool_handle", staticmethod(object), raising=False)
    patch.setattr(platform, "_global_graph_pool", None)
    # Attention outside of graphs without a compiler; vLLM calls these graphs breakable.
    patch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")


def _routes(backend: Backend, patch: pytest.MonkeyPatch) -> None:
    """The routes of a Hopper GPU.

    Numbers are float32, so that tokens can be compared with those of another backend. The route is
    the one of bfloat16, because FlashAttention has no float32.
    """
    from vllm_dllm.attention import served_route

    versions = frozenset(range(2, (backend.flash_version or 4) + 1))
    choose = served_route.choose_route

    def choose_route(device: Device, model: ModelAttention, asked: Options) -> Route:
        return choose(device, replace(model, dtype="bfloat16"), asked)

    patch.setattr(served_route, "device_here", lambda: Device("cuda", (9, 0), True, versions))
    patch.setattr(served_route, "choose_route", choose_route)


def _worker(watch: Watch, patch: pytest.MonkeyPatch) -> None:
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

    parts = ("profile_run", "profile_cudagraph_memory", "initialize_kv_cache", "capture_model")
    for name in parts:
        _note_start(model_runner.GPUModelRunner, name, watch, patch)
    _note_start(gpu_worker, "warmup_kernels", watch, patch)
    warm_up = gpu_worker.Worker.compile_or_warm_up_model
    patch.setattr(CPUWorker, "determine_available_memory", profile)
    patch.setattr(CPUWorker, "compile_or_warm_up_model", warm_up)
    patch.setattr(CPUWorker, "_maybe_activate_jit_monitor", lambda self: None)
    patch.setattr(gpu_worker, "freeze_gc_heap", lambda: None)
    patch.setattr(gpu_worker, "enable_gpu_sync_check", lambda: None)
    patch.setattr(model_runner, "lock_workspace", lambda: None)
    patch.setattr(prompt_logprobs, "get_prompt_logprobs_token_ids", no_token_ids)
    with contextlib.suppress(ImportError):  # since vLLM 0.33
        from vllm.model_executor.warmup import step5_dsa_warmup

        # It looks for another model's layers, whose module needs Triton.
        patch.setattr(step5_dsa_warmup, "_step5_dsa_impl", lambda worker: None)


def _note_start(owner: Any, name: str, watch: Watch, patch: pytest.MonkeyPatch) -> None:
    original = getattr(owner, name)

    def noted(*arguments: Any, **options: Any) -> Any:
        watch.started.append(name)
        return original(*arguments, **options)

    patch.setattr(owner, name, noted)


def _model_state(watch: Watch, patch: pytest.MonkeyPatch) -> None:
    """Tell the watch of every batch that is prepared, for a step or for a capture."""
    from vllm.v1.worker.gpu import model_runner

    from vllm_dllm.engine.model_state import DiffusionModelState

    prepare, inputs, dummy, finish = (
        DiffusionModelState.prepare_attn,
        DiffusionModelState.prepare_inputs,
        DiffusionModelState.prepare_dummy_inputs,
        model_runner.GPUModelRunner.finish_requests,
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

    def finish_requests(self: Any, scheduler_output: Any) -> None:
        watch.preempted += len(scheduler_output.preempted_req_ids or ())
        finish(self, scheduler_output)

    patch.setattr(DiffusionModelState, "prepare_attn", prepare_attn)
    patch.setattr(DiffusionModelState, "prepare_inputs", prepare_inputs)
    patch.setattr(DiffusionModelState, "prepare_dummy_inputs", prepare_dummy_inputs)
    patch.setattr(model_runner.GPUModelRunner, "finish_requests", finish_requests)
