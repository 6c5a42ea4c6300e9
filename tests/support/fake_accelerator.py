"""A fake accelerator: a step at the published sizes, without memory, with its costs counted.

Tensors of the fake device have shapes and dtypes but no content, and reading a value yields an
arbitrary one. `Cost` counts what the same calls would do on a GPU: kernels, copies between host and
device, and waits, each with the line of this package that caused it. Registering the device changes
the whole process, so what uses this module runs in a process of its own, see `fake_steps`.

What is not as on a GPU: an operator is one kernel here, although some of CUDA's (sorts, top-k,
cumulative sums) launch several, and an operator of CUDA's may wait without being known for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.v1.sample.ops.topk_topp_triton import _SPLIT_MAX_BATCH, _SPLIT_ROUNDS

import vllm_dllm
from vllm_dllm.engine import row_options
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.engine.to_device import to_device

PACKAGE = str(Path(vllm_dllm.__file__).parent) + "/"
NAME = "fakegpu"
# Operators that launch nothing, beside views.
NO_KERNEL = {
    *("device", "empty", "empty_like", "empty_strided", "new_empty", "resize_", "set_"),
    *("_unsafe_view", "is_same_size", "is_pinned", "sym_size", "sym_stride", "sym_numel"),
}
# Operators whose result's shape depends on values: the device must be waited for.
WAITS = {"nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "_local_scalar_dense"}
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index"}


@dataclass
class Cost:
    """Counts what happens while it is entered, inside `fake_accelerator`, one at a time.

    Places are ``file:line``; `waits` are those where the host reads a value or a shape back.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    written: int = 0  # bytes of new tensors
    copies: int = 0
    waits: list[str] = field(default_factory=list)

    def __enter__(self) -> Cost:
        FakeDevice.cost = self
        return self

    def __exit__(self, *_: object) -> None:
        FakeDevice.cost = None

    def summary(self) -> dict[str, Any]:
        return {
            "kernels": self.kernels.total(),
            "copies": self.copies,
            "written": self.written,
            "waits": dict(Counter(self.waits)),
        }

    def note_waits(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """Count an operator that is about to run, if the device has to be waited for."""
        if not any(map(_on_device, _tensors((args, kwargs)))):
            return
        masks = name in INDEXING and any(i is not None and i.dtype is torch.bool for i in args[1])
        # The length of the result is the sum of the counts, unless the caller knows it.
        repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in WAITS or masks or repeats:
            self.waits.append(f"{_caller()} {name}")

    def note(
        self, func: Any, args: Any, kwargs: dict[str, Any], results: list[torch.Tensor]
    ) -> None:
        """Count an operator that has run: a copy between host and device, or a kernel."""
        name = func.overloadpacket.__name__
        if not func.is_view:
            given = {id(tensor) for tensor in _tensors((args, kwargs))}
            self.written += sum(t.nbytes for t in results if _on_device(t) and id(t) not in given)
        if self._noted_copy(name, args, kwargs, results) or func.is_view or name in NO_KERNEL:
            return
        if any(map(_on_device, _tensors((args, kwargs)) + results)):
            self.kernels[_caller()] += 1

    def _noted_copy(
        self, name: str, args: Any, kwargs: dict[str, Any], results: list[torch.Tensor]
    ) -> bool:
        """Whether the operator is a copy between host and device, and nothing else."""
        if name in ("index_put", "index_put_") and _is_scalar(args[2]):
            # On CUDA, the value of `tensor[indices] = 1.0` is a tensor on the host.
            self.waits.append(_caller())
        if name not in ("_to_copy", "copy_"):
            return False
        source, target = (args[0], results[0]) if name == "_to_copy" else (args[1], args[0])
        if _is_scalar(source) and not target.ndim:  # the same for `tensor[0] = 1.0`
            self.waits.append(_caller())
        elif _on_device(source) != _on_device(target):
            non_blocking = bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))
            # Only an asynchronous copy of pinned memory goes on at once.
            if non_blocking and _is_pinned(source if _on_device(target) else target):
                self.copies += 1
            else:
                self.waits.append(_caller())
            return True
        return False


class FakeDevice(TorchDispatchMode):
    """Does what the fake tensors cannot, and tells the `Cost` that is entered of each operator."""

    cost: Cost | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "is_pinned":
            return _is_pinned(args[0])
        pin = kwargs.pop("pin_memory", False) or name == "_pin_memory"
        if name == "_pin_memory":
            func, args = torch.ops.aten.clone.default, args[:1]
        if self.cost is not None:
            self.cost.note_waits(name, args, kwargs)
        if name == "_local_scalar_dense":
            return 1.0 if args[0].is_floating_point() else args[0].dtype is torch.bool or 1
        result = func(*args, **kwargs)
        results = _tensors(result)
        for tensor in results:
            if pin or (func.is_view and _is_pinned(args[0])):
                tensor.is_pinned_here = True
            if name == "scalar_tensor":
                tensor.is_python_scalar = True
        if self.cost is not None:
            self.cost.note(func, args, kwargs, results)
        return result


def _tensors(of: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(of) if isinstance(leaf, torch.Tensor)]


def _on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == NAME


def _is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "is_pinned_here", False)


def _is_scalar(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "is_python_scalar", False)


def _caller() -> str:
    """The innermost line of the package on the stack, ``file:line``; `to_device` is no place."""
    frame: Any = sys._getframe(1)
    while frame is not None and (
        not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code is to_device.__code__
    ):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename[len(PACKAGE) :]}:{frame.f_lineno}"


def _with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with real tensors on the host, because what it makes depends on their values."""

    def called(*args: Any) -> Any:
        with fake_tensor.unset_fake_temporarily():
            return function(*args)

    return called


def filters(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """As many kernels as vLLM's `apply_top_k_top_p_triton` launches."""
    split = p is not None and len(logits) <= _SPLIT_MAX_BATCH
    whole = k is not None or (p is not None and not split)
    for _ in range(whole + split * (_SPLIT_ROUNDS + 2)):
        logits.neg_()
    return logits


@contextlib.contextmanager
def fake_accelerator() -> Iterator[torch.device]:
    """Run with a fake device, where every tensor is fake and pinned memory exists."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as setup

    if torch._C._get_privateuse1_backend_name() != NAME:
        setup(NAME)
    stock = torch.tensor

    def tensor(data: Any, *args: Any, device: Any = None, pin_memory: bool = False, **kw: Any):
        """Like torch's, which copies to an accelerator and waits; without the content."""
        made = stock(data, *args, **kw)
        if not pin_memory and (device is None or torch.device(device).type == "cpu"):
            return made
        host = torch.empty(made.shape, dtype=made.dtype, pin_memory=pin_memory)
        return host if device is None else host.to(device)

    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_tensor.FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mock.patch.object(torch, "tensor", tensor))
        # Without it, a tensor of one element would keep its value.
        stack.enter_context(mock.patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", 0))
        stack.enter_context(mock.patch.object(row_options, "apply_top_k_top_p", filters))
        fresh = _with_values(SlotState._fresh_on_host)
        stack.enter_context(mock.patch.object(SlotState, "_fresh_on_host", fresh))
        stack.enter_context(FakeDevice())
        yield torch.device(NAME)
