"""Swap Model Runner V2's Triton kernels for their stand-ins, and launch those."""

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_cpu_v2 import batch_kernels, logprob_kernels, table_kernels

_GPU = "vllm.v1.worker.gpu"

# Kernel (under `vllm.v1.worker.gpu`) -> stand-in.
STAND_INS: dict[str, Callable[..., None]] = {
    "buffer_utils._apply_write_kernel": table_kernels.apply_write,
    "block_table._gather_block_tables_kernel": table_kernels.gather_block_tables,
    "block_table._compute_slot_mappings_kernel": table_kernels.compute_slot_mappings,
    "input_batch._prepare_prefill_inputs_kernel": batch_kernels.prepare_prefill_inputs,
    "input_batch._prepare_pos_seq_lens_kernel": batch_kernels.prepare_pos_seq_lens,
    "input_batch._combine_sampled_and_draft_tokens_kernel": (
        batch_kernels.combine_sampled_and_draft_tokens
    ),
    "input_batch._get_num_sampled_and_rejected_kernel": batch_kernels.get_num_sampled_and_rejected,
    "input_batch._post_update_kernel": batch_kernels.post_update,
    "input_batch._post_update_num_computed_tokens_kernel": (
        batch_kernels.post_update_num_computed_tokens
    ),
    "input_batch._expand_idx_mapping_kernel": batch_kernels.expand_idx_mapping,
    "sample.logprob._topk_log_softmax_kernel": logprob_kernels.topk_log_softmax,
    "sample.logprob._ranks_kernel": logprob_kernels.ranks,
    "sample.logprob._fill_logprob_token_ids_kernel": logprob_kernels.fill_logprob_token_ids,
}

# Kernel arguments that a stand-in need not name: sizes of tiles, which mean nothing here, and
# strides that the tensors have themselves. (`output_stride` and `block_table_strides` belong to raw
# addresses.) Any other argument that a stand-in does not know means that the kernel has changed,
# and stops the swap.
_NOT_NEEDED = frozenset(
    {
        "BLOCK_SIZE",
        "TRITON_BLOCK_SIZE",
        "TOPK_BLOCK_SIZE",
        "LOOKAHEAD_BLOCK",
        "num_blocks_stride",
        "slot_mappings_stride",
        "next_prefill_tokens_stride",
        "all_token_ids_stride",
        "draft_tokens_stride",
        "sampled_tokens_stride",
        "output_bin_counts_stride",
        "logits_stride",
        "topk_ids_stride",
        "out_token_ids_stride",
        "out_valid_mask_stride",
        "topk_indices_stride",
        "per_req_token_ids_stride",
    }
)


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
        parameters = inspect.signature(getattr(kernel, "fn", kernel)).parameters
        self.original, self.function, self.arg_names = kernel, function, tuple(parameters)
        self.__name__ = getattr(kernel, "__name__", function.__name__)
        accepted = dict(inspect.signature(function).parameters)
        del accepted["grid"]
        self._accepted = accepted.keys()
        self._defaults = {
            name: p.default
            for name, p in parameters.items()
            if name in self._accepted and p.default is not p.empty
        }
        unknown = parameters.keys() - self._accepted - _NOT_NEEDED
        # An argument with a default is not in every version of the kernel.
        needed = {name for name, p in accepted.items() if p.default is p.empty}
        missing = needed - parameters.keys()
        if unknown or missing:
            raise KernelMismatchError(
                f"the CPU stand-in for {self.__name__} does not fit this vLLM: "
                f"unknown arguments {sorted(unknown)}, missing arguments {sorted(missing)}"
            )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return the launcher for one grid."""
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """Call the function with the arguments that it takes.

        The rest are those of `_NOT_NEEDED`, and Triton's options of a launch, such as `num_warps`.
        """
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        taken = {name: value for name, value in bound.items() if name in self._accepted}
        self.function(grid, **self._defaults | taken)


def swap_kernels() -> int:
    """Put every stand-in in its kernel's place, in every module that holds the kernel.

    Modules that import a kernel later find the stand-in. Those that have already imported it hold
    the kernel itself, so all loaded modules are searched for it, by identity: a comparison for
    equality would run code of lazy placeholder modules. A second call changes nothing.

    Returns:
        The number of kernels that have stand-ins.

    Raises:
        KernelMismatchError: a kernel is missing, or its arguments differ from its stand-in's.
    """
    # This module replaces torch functions that the GPU modules copy at their own import.
    importlib.import_module("vllm.v1.worker.cpu.shm")
    replacements: dict[int, KernelStandIn] = {}
    for path, function in STAND_INS.items():
        module_name, name = path.rsplit(".", 1)
        kernel = getattr(importlib.import_module(f"{_GPU}.{module_name}"), name, None)
        if kernel is None:
            raise KernelMismatchError(f"this vLLM has no kernel {_GPU}.{path}")
        if not isinstance(kernel, KernelStandIn):
            replacements[id(kernel)] = KernelStandIn(kernel, function)
    if replacements:
        for module in list(sys.modules.values()):
            namespace = getattr(module, "__dict__", None) or {}
            for name, value in list(namespace.items()):
                if id(value) in replacements:
                    namespace[name] = replacements[id(value)]
    return len(STAND_INS)
