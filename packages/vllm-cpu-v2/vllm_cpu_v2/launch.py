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

# Kernel arguments that have no meaning here, so that a stand-in need not name them. Any other
# argument that a stand-in does not know means that the kernel has changed, and stops the swap.
_TILING = frozenset({"BLOCK_SIZE", "TRITON_BLOCK_SIZE", "TOPK_BLOCK_SIZE", "LOOKAHEAD_BLOCK"})
# Strides of tensors, which the tensors have themselves. Stand-ins name only the strides of raw
# addresses: `output_stride` and those of the block tables.
_STRIDES = frozenset(
    {
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
# Options of a launch, not of a kernel.
_LAUNCH_OPTIONS = frozenset(
    {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "enable_fp_fusion"}
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
        accepted = dict(inspect.signature(function).parameters)
        accepted.pop("grid")
        self.original = kernel
        self.function = function
        self.__name__ = getattr(kernel, "__name__", function.__name__)
        self.arg_names = tuple(parameters)
        unknown = parameters.keys() - accepted.keys() - _TILING - _STRIDES
        # An argument with a default is not in every version of the kernel.
        needed = {name for name, p in accepted.items() if p.default is p.empty}
        missing = needed - parameters.keys()
        if unknown or missing:
            raise KernelMismatchError(
                f"the CPU stand-in for {self.__name__} does not fit this vLLM: "
                f"unknown arguments {sorted(unknown)}, missing arguments {sorted(missing)}"
            )
        self._names = frozenset(parameters)
        self._dropped = tuple(parameters.keys() - accepted.keys())
        self._defaults = {
            name: p.default for name, p in parameters.items() if p.default is not p.empty
        }

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return the launcher for one grid."""
        return partial(self._launch, grid)

    def _launch(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        bound = dict(self._defaults)
        bound.update(zip(self.arg_names, args, strict=False))
        bound.update(kwargs)
        if len(args) > len(self.arg_names) or bound.keys() != self._names:
            self._refuse_or_strip(bound, len(args))
        if callable(grid):
            grid = grid(bound)
        for name in self._dropped:
            del bound[name]
        self.function(grid, **bound)

    def _refuse_or_strip(self, bound: dict[str, Any], positional: int) -> None:
        """Take launch options out of `bound`; raise for anything else that does not fit."""
        for name in _LAUNCH_OPTIONS - self._names:
            bound.pop(name, None)
        unknown, missing = bound.keys() - self._names, self._names - bound.keys()
        if unknown or missing or positional > len(self.arg_names):
            raise KernelMismatchError(
                f"launch of {self.__name__} with {positional} positional arguments of "
                f"{len(self.arg_names)}: unknown {sorted(unknown)}, missing {sorted(missing)}"
            )


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
