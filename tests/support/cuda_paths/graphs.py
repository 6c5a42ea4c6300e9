"""CUDA graphs that are functions: what vLLM captured, called again with what it was captured with.

vLLM's own code decides what is captured, in which order, and which graph a step replays. A replay
here calls the captured function: it reads tensors where they were at the capture and has the
captured numbers of the host, as a real graph does. What a step was prepared with is compared with
that before, because a real graph would pass over any difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context

from tests.support.cuda_paths.watch import Watch, differences


def install(watch: Watch, patch: pytest.MonkeyPatch) -> None:
    """Give vLLM these graphs in place of CUDA's."""
    import vllm.v1.worker.gpu.cudagraph_utils as module

    class Graph(FullGraph):
        def __init__(self) -> None:
            super().__init__(watch)

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
    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph", capturing)


class FullGraph:
    """In the place of ``torch.cuda.CUDAGraph``: one forward pass of the whole model."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def capture(self, forward: Callable[[CUDAGraphMode], None]) -> None:
        """Keep what vLLM is about to capture, which it has just prepared."""
        self.forward = forward
        self.metadata, self.inputs = self.watch.metadata, self.watch.inputs

    def replay(self) -> None:
        """Run the captured pass."""
        watch = self.watch
        watch.note(differences(self.metadata, watch.metadata), "a full graph")
        watch.note(differences(self.inputs, watch.inputs), "a full graph's inputs")
        self.forward(CUDAGraphMode.NONE)


class PiecewiseGraphs:
    """In the place of vLLM's ``BreakableCUDAGraphWrapper``: attention runs outside of the graphs.

    So attention has the metadata of the step, and everything else reads the inputs that were
    captured. The result lies where the capture left it.
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
