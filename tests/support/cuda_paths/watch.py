"""What a test has seen of an engine's steps, and what was wrong with them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_dllm.vllm_seams.channels import Failure

# Upper bounds. A graph has those of its capture, and every call is checked against what it has.
BOUNDS = ("max_query_len", "max_seq_len")


class Watch:
    """The observer of one engine, told by the model state and the kernels.

    Attributes:
        problems: what was wrong, each once.
        steps: steps of requests, by the kind of graph that ran them.
        mixed: steps that computed prompts beside canvases.
        padded: replays of full graphs with rows that belong to no request.
        further: passes after the first one of a step, of which `stopped` had canvases that stopped.
        whole_rows: steps with requests that filter, bias or report whole rows of logits.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.steps: Counter[str] = Counter()
        self.mixed = self.padded = self.calls = self.whole_rows = self.preempted = 0
        self.further = self.stopped = 0
        # Of the step that is about to run, or that is being captured.
        self.tokens: int | None = None
        self.not_stored = 0  # tokens of canvases that have stopped
        self.metadata: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}

    def note(self, found: Iterable[str], where: str = "") -> None:
        for problem in found:
            text = f"{where}: {problem}" if where else problem
            if text not in self.problems:
                self.problems.append(text)

    def prepares(
        self, metadata: dict[str, Any], state: Any, batch: Any, mode: CUDAGraphMode, *_: Any
    ) -> None:
        """Metadata of a step was built, or for a capture, whose batch belongs to no request."""
        self.metadata, self.tokens = metadata, None
        if batch.req_ids[0] not in state.slot_of:
            return
        self.tokens = int(batch.num_scheduled_tokens[: batch.num_reqs].sum())
        failures = state.slots.failure[batch.idx_mapping[: batch.num_reqs].long()]
        if (failures == Failure.NOT_TAKEN_UP).any():
            self.note(["a request could not be admitted"])
        self.steps[mode.name] += 1
        self.whole_rows += bool(state.slots.needs_rows[batch.idx_mapping_np].any())
        drafts = batch.num_draft_tokens_per_req
        self.mixed += bool(batch.has_prefill and drafts is not None and drafts.any())
        self.padded += mode == CUDAGraphMode.FULL and batch.num_reqs_after_padding > batch.num_reqs

    @contextlib.contextmanager
    def replays(self, stopped: torch.Tensor, length: int) -> Iterator[None]:
        """A further pass runs, in which these canvases (bool ``[n]``) have stopped."""
        self.further += 1
        self.stopped += bool(stopped.any())
        self.not_stored = int(stopped.sum()) * length
        yield
        self.not_stored = 0

    def stores(self, slot_mapping: torch.Tensor) -> None:
        if self.tokens is not None:
            if (slot_mapping[self.tokens :] >= 0).any():
                self.note([f"padding after token {self.tokens} is stored in the KV cache"])
            if int((slot_mapping[: self.tokens] < 0).sum()) != self.not_stored:
                self.note(["tokens are missing in the KV cache, or stored for a canvas that left"])


def differences(captured: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """How a step differs from the capture of its graph, so that the graph would not read it.

    A graph reads tensors where they were, with the shapes that they had, and it has numbers of
    the host built in. Both are metadata by layer, or inputs by name.
    """
    found = set()  # layers of a group share their metadata
    for name in captured.keys() | now.keys():
        before, after = dict(leaves(captured.get(name))), dict(leaves(now.get(name)))
        for field in before.keys() | after.keys():
            text = _difference(field.split(".")[-1], before.get(field), after.get(field))
            if text:
                found.add(f"{field or name}: {text}")
    yield from sorted(found)


def _difference(name: str, before: Any, after: Any) -> str | None:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        if before.shape != after.shape or before.dtype != after.dtype:
            return f"{tuple(after.shape)}, captured as {tuple(before.shape)}"
        if before.data_ptr() != after.data_ptr() or before.stride() != after.stride():
            return "elsewhere than captured"
    elif name not in BOUNDS and (type(before) is not type(after) or before != after):
        return f"{after}, captured as {before}"
    return None


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, tensor or number) of everything in nested dataclasses and named tuples."""
    if dataclasses.is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        parts = value._asdict()
    else:
        yield path, value
        return
    for name, part in parts.items():
        yield from leaves(part, f"{path}.{name}" if path else name)
