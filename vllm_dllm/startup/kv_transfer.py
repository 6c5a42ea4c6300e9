"""Decide whether a connector may carry keys and values between engines, by one rule.

1. Only keys and values of committed blocks leave or enter: not those of a canvas that is being
   denoised, of a prompt's tail inside a block, or of an answer's last canvas, without a commit.
2. A loaded prefix ends on a boundary of both the model's blocks and vLLM's pages.
3. What is saved is addressed by its tokens and by everything else that it depends on: the model,
   the block length, the window.

vLLM's own connectors do not keep it; `kv_transfer.connector` does under vLLM's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "--kv-transfer-config"
ALLOWED = "ExampleConnector"
MODULE = "vllm_dllm.kv_transfer.connector"
NOT_FINAL = (
    "it would move keys and values that are not final, or that its addresses do not tell apart"
)


def check_kv_transfer(vllm_config: VllmConfig) -> None:
    """Raise ValueError for connectors that do not keep the rule; our class serves `ALLOWED`."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    size, transfer = cache.kv_offloading_size, vllm_config.kv_transfer_config
    if size is not None:
        raise ValueError(f"--kv-offloading-size {size}: {NOT_FINAL}; remove it")
    if transfer is None:
        return
    name, path = transfer.kv_connector, transfer.kv_connector_module_path
    if name != ALLOWED or path not in (None, MODULE):
        where = f" of {path!r}" if path else ""
        raise ValueError(
            f"{OPTION}: connector {name!r}{where}: {NOT_FINAL}; choose {ALLOWED}, or remove it"
        )
    unknown = sorted(transfer.kv_connector_extra_config.keys() - {"shared_storage_path"})
    if unknown:
        raise ValueError(
            f"{OPTION}: {ALLOWED} has no setting {unknown[0]!r}, only 'shared_storage_path'; "
            "remove it"
        )
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"{OPTION}: each rank has a part of the keys and values, and parts are not transferred;"
            " remove it, or --tensor-parallel-size and --pipeline-parallel-size"
        )
    if str(cache.cache_dtype).startswith(("fp8", "int", "nvfp4", "turboquant")):
        raise ValueError(
            f"{OPTION}: the scales of --kv-cache-dtype {cache.cache_dtype} are not transferred; "
            "remove one of the two"
        )
    if transfer.enable_permute_local_kv:
        raise ValueError(f"{OPTION}: enable_permute_local_kv is not supported; remove it")
    transfer.kv_connector_module_path = MODULE
