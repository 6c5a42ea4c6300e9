"""Swap Model Runner V2's Triton kernels for their stand-ins, and launch those."""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from vllm_cpu_v2 import kernels

# The stand-ins by module under `vllm.v1.worker.gpu`. The one for `_a_kernel` is called `a`.
STAND_INS: dict[str, tuple[Callable[..., None], ...]] = {
    "buffer_utils": (kernels.apply_write,),
    "block_table": (kernels.gather_block_tables, kernels.compute_slot_mappings),
    "input_batch": (
        kernels.prepare_prefill_inputs,
        kernels.prepare_pos_seq_lens,
        kernels.combine_sampled_and_draft_tokens,
        kernels.post_update,
        kernels.post_update_num_computed_tokens,
        kernels.expand_idx_mapping,
    ),
    "sample.logprob": (kernels.topk_log_softmax, kernels.ranks, kernels.fill_logprob_token_ids),
}

# Arguments that a stand-in need not name. Nor need it name strides, which the tensors have
# themselves. Any other argument that it does not know means that the kernel has changed, and stops
# the swap.
_NOT_NEEDED = {
    # sizes of tiles and of tensors
    *("BLOCK_SIZE", "TRITON_BLOCK_SIZE", "TOPK_BLOCK_SIZE", "LOOKAHEAD_BLOCK", "PADDED_COLS"),
    *("topk", "vocab_size"),
    # for speculators and for context parallelism
    *("last_sampled_tokens_ptr", "next_prefill_tokens_ptr", "num_lookahead", "num_draft_tokens"),
    *("dcp_sharded", "cp_rank", "CP_INTERLEAVE"),
}


class KernelMismatchError(TypeError):
    """A kernel's arguments differ from those that its stand-in was written for."""


class KernelStandIn:
    """Looks like a Triton kernel to its launcher (`kernel[grid](...)`) and calls a function.

    Arguments are passed by the kernel's own names. A version of vLLM that reorders them needs no
    change here. One that adds, drops or renames an argument is refused when the swap is made, with
    the name of the argument.
    """

    def __init__(self, kernel: Callable[..., Any], function: Callable[..., None]) -> None:
        """Check that `function` takes the arguments of `kernel` (a function or a JIT wrapper).

        Raises:
            KernelMismatchError: it does not.
        """
        # A JIT wrapper keeps the Python function in `fn`; without Triton it is the function.
        names = tuple(inspect.signature(getattr(kernel, "fn", kernel)).parameters)
        self.function = function
        # A function that numba compiles keeps the Python function, and takes arrays.
        self.takes_arrays = hasattr(function, "py_func")
        taken = dict(inspect.signature(getattr(function, "py_func", function)).parameters)
        del taken["grid"]
        unknown = {name for name in names if not name.endswith("_stride")}
        unknown -= taken.keys() | _NOT_NEEDED
        # An argument with a default is not in every version of the kernel.
        needed = {name for name, taker in taken.items() if taker.default is taker.empty}
        missing = needed - {*names}
        if unknown or missing:
            raise KernelMismatchError(
                f"the CPU stand-in {function.__name__} does not fit the kernel of this vLLM: "
                f"unknown arguments {sorted(unknown)}, missing arguments {sorted(missing)}"
            )
        # What the function takes: where the kernel has it, its name, and its default.
        places = {name: place for place, name in enumerate(names)}
        self.taken = tuple(
            (places.get(name, len(names)), name, taker.default) for name, taker in taken.items()
        )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return the launcher for one grid."""
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """Call the function with the arguments that it takes.

        The rest are those of `_NOT_NEEDED`, and Triton's options of a launch, such as `num_warps`.
        """
        given = len(args)
        values = [
            args[place] if place < given else kwargs.get(name, default)
            for place, name, default in self.taken
        ]
        if self.takes_arrays:
            values = [value.numpy() if isinstance(value, Tensor) else value for value in values]
        self.function(grid, *values)


def swap_kernels() -> None:
    """Put every stand-in in its kernel's place; a second call changes nothing.

    vLLM launches each of these kernels in the kernel's own module only.

    Raises:
        AttributeError: a kernel is missing.
        KernelMismatchError: a kernel's arguments differ from its stand-in's.
    """
    # This module replaces torch functions that the GPU modules copy at their own import.
    importlib.import_module("vllm.v1.worker.cpu.shm")
    for name, functions in STAND_INS.items():
        module = importlib.import_module(f"vllm.v1.worker.gpu.{name}")
        for function in functions:
            kernel = getattr(module, f"_{function.__name__}_kernel")
            if not isinstance(kernel, KernelStandIn):
                setattr(module, f"_{function.__name__}_kernel", KernelStandIn(kernel, function))
