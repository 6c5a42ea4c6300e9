"""The start-up of a GPU worker in a CPU worker, and CUDA graphs that are functions.

A replay reads tensors where they were at the capture and has the captured numbers of the host. What
the step was prepared with is compared with that before, because a real graph would pass over any
difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context

from tests.support.cuda_paths import backends
from tests.support.cuda_paths.backends import Backend
from tests.support.cuda_paths.watch import Watch, differences
from vllm_dllm.attention.routes import Device, ModelAttention, Options, Route


def _graphs(watch: Watch, patch: pytest.MonkeyPatch) -> None:
    import vllm.v1.worker.gpu.cudagraph_utils as module

    class Pieces(PiecewiseGraphs):
        watched = watch

    latest: list[Callable[[CUDAGraphMode], None]] = []

    @contextlib.contextmanager
    def capturing(graph: FullGraph, *_: Any, **__: Any) -> Iterator[None]:
        graph.capture(latest[-1])
        yield

    capture = module.CudaGraphManager.capture

    def capture_all(self: Any, create_forward: Any, *arguments: Any) -> None:
        def create(*shape: Any, **options: Any) -> Callable[[CUDAGraphMode], None]:
            latest[:] = [create_forward(*shape, **options)]
            return latest[0]

        capture(self, create, *arguments)

    patch.setattr(module.CudaGraphManager, "capture", capture_all)
    patch.setattr(module, "BreakableCUDAGraphWrapper", Pieces)
    patch.setattr(module, "graph_capture", lambda device: contextlib.nullcontext())
    patch.setattr(module, "capture_pool", lambda pool, _: contextlib.nullcontext(pool))
    patch.setattr(module, "current_stream", lambda: None)
    patch.setattr(torch.cuda, "CUDAGraph", partial(FullGraph, watch))
    patch.setattr(torch.cuda, "graph", capturing)


class FullGraph:
    """In the place of ``torch.cuda.CUDAGraph``: one forward pass of the whole model."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def capture(self, forward: Callable[[CUDAGraphMode], None]) -> None:
        self.forward = forward
        self.metadata, self.inputs = self.watch.metadata, self.watch.inputs

    def replay(self) -> None:
        watch = self.watch
        watch.note(differences(self.metadata, watch.metadata), "a full graph")
        watch.note(differences(self.inputs, watch.inputs), "a full graph's inputs")
        self.forward(CUDAGraphMode.NONE)


class PiecewiseGraphs:
    """In the place of vLLM's ``BreakableCUDAGraphWrapper``: attention runs outside of the graphs.

    It has the metadata of the step, and everything else reads the inputs that were captured.
    """

    watched: ClassVar[Watch]
    _all_instances: ClassVar[list[PiecewiseGraphs]] = []

    def __init__(self, model: Callable[..., torch.Tensor], _: Any, key_fn: None = None) -> None:
        self.model, self.graph_pool = model, None
        self.captured: dict[BatchDescriptor, tuple[dict[str, Any], torch.Tensor]] = {}

    @classmethod
    def clear_all_graphs(cls) -> None:
        """Graphs of a discarded manager are gone with it."""

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Capture the first batch of a shape, and replay it for the next ones."""
        shape = get_forward_context().batch_descriptor
        if shape not in self.captured:
            self.captured[shape] = inputs, self.model(**inputs)
            return self.captured[shape][1]
        before, result = self.captured[shape]
        self.watched.note(differences(before, inputs), "a piecewise graph's inputs")
        return result.copy_(self.model(**before))


@contextlib.contextmanager
def cuda_paths(backend: Backend) -> Iterator[Watch]:
    """Let engines that are started here take the paths of CUDA; everything is undone at the end.

    An engine must have run in this process before: on the CPU, vLLM's runner must not be imported
    until a worker has replaced its Triton kernels.

    `backend` is the one that is going to be chosen with ``--attention-backend``.
    """
    from vllm.v1.attention.selector import _cached_get_attn_backend

    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        backends.install(backend, watch, patch)
        _graphs(watch, patch)
        _platform(patch)
        _routes(backend, patch)
        _worker(patch)
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


def _worker(patch: pytest.MonkeyPatch) -> None:
    """The start-up of vLLM's GPU worker, but for what lasts longer than an engine."""
    import vllm.v1.worker.gpu.sample.prompt_logprob as prompt_logprobs
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu import model_runner

    def profile(self: Any) -> int:
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
    with contextlib.suppress(ImportError):  # since vLLM 0.33
        from vllm.model_executor.warmup import step5_dsa_warmup

        # It looks for another model's layers, whose module needs Triton.
        patch.setattr(step5_dsa_warmup, "_step5_dsa_impl", lambda worker: None)


def _model_state(watch: Watch, patch: pytest.MonkeyPatch) -> None:
    """Tell the watch of every batch that is prepared, for a step or for a capture."""
    from vllm_dllm.engine.model_state import DiffusionModelState
    from vllm_dllm.engine.replayed_passes import ReplayedPasses

    replay = ReplayedPasses._replay

    def replayed(self: Any, graph: Any, step: Any, stopped: torch.Tensor) -> torch.Tensor:
        with watch.replays(stopped, self.state.slots.length):
            return replay(self, graph, step, stopped)

    patch.setattr(ReplayedPasses, "_replay", replayed)

    def hear(name: str, told: Callable[..., None]) -> None:
        original = getattr(DiffusionModelState, name)

        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            result = original(self, *arguments, **options)
            told(result, self, *arguments)
            return result

        patch.setattr(DiffusionModelState, name, method)

    hear("prepare_attn", watch.prepares)
    for name in ("prepare_inputs", "prepare_dummy_inputs"):
        hear(name, lambda inputs, *_: setattr(watch, "inputs", inputs))
