"""Decide which connectors may carry keys and values between engines, by one rule.

1. Only keys and values of committed blocks leave or enter. A canvas that is still being denoised
   never does, nor does the tail of a prompt inside a block, nor the last canvas of an answer, which
   leaves without a commit.
2. A loaded prefix ends on a boundary of both the model's blocks and vLLM's pages.
3. What is saved is addressed by its tokens and by everything else that it depends on: the model,
   the block length, the window.

A class of this package (`kv_transfer.connector`) serves ``ExampleConnector``; vLLM's factory finds
it through the option for third-party connectors (``kv_connector_module_path``). The reasons in
`REFUSED` come from reading vLLM's source; none of these connectors has been run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

OPTION = "--kv-transfer-config"
ALLOWED, SEVERAL = "ExampleConnector", "MultiConnector"
MODULE = "vllm_dllm.kv_transfer.connector"
PARTS_HAVE = {"kv_connector", "kv_role", "kv_connector_extra_config", "kv_connector_module_path"}
REMEDY = f"choose {ALLOWED}, or remove it"

_WHOLE_PROMPT = "it hands over a prompt's tail inside a block"
_ANSWERS = "it saves the last canvas of an answer, which leaves without a commit"
_ELSEWHERE = "what it saves is decided in a package that is not part of vLLM"
REFUSED = {
    "DecodeBenchConnector": "it fills the KV cache with made-up numbers",
    "ExampleHiddenStatesConnector": "it saves hidden states, for which canvases have no place",
    "FlexKVConnectorV1": _ELSEWHERE,
    "HF3FSKVConnector": "what it saves is addressed by tokens alone",
    "HiSparseConnector": "it is for models with sparse attention",
    "LMCacheConnectorV1": _WHOLE_PROMPT,
    "LMCacheMPConnector": _ELSEWHERE,
    "MoRIIOConnector": _WHOLE_PROMPT,
    "MooncakeConnector": _WHOLE_PROMPT,
    "MooncakeStoreConnector": _ANSWERS,
    "NixlConnector": _WHOLE_PROMPT,
    "NixlPullConnector": _WHOLE_PROMPT,
    "NixlPushConnector": _WHOLE_PROMPT,
    "OffloadingConnector": _ANSWERS,
    "SimpleCPUOffloadConnector": _ANSWERS,
}
UNKNOWN = "it is not known what it saves"


def check_kv_transfer(vllm_config: VllmConfig) -> None:
    """Refuse connectors that cannot keep the rule, and have our class serve the others.

    Raises:
        ValueError: a connector or one of its options is refused; the message names the option and
            the remedy.
    """
    size = vllm_config.cache_config.kv_offloading_size
    if size is not None:
        raise ValueError(
            f"--kv-offloading-size {size}: {REFUSED['OffloadingConnector']}; remove it"
        )
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    _refuse_what_is_not_carried(vllm_config, transfer)
    if transfer.kv_connector != SEVERAL:
        path, extra = transfer.kv_connector_module_path, transfer.kv_connector_extra_config
        _check(transfer.kv_connector, path, extra)
        transfer.kv_connector_module_path = MODULE
        return
    for part in _parts(transfer):
        path, extra = part.get("kv_connector_module_path"), part.get("kv_connector_extra_config")
        _check(part.get("kv_connector"), path, extra or {})
        part["kv_connector_module_path"] = MODULE


def _parts(transfer: KVTransferConfig) -> list[dict[str, Any]]:
    """The connectors of a MultiConnector, with the settings that vLLM reads from each of them."""
    if transfer.kv_connector_module_path:
        _check(SEVERAL, transfer.kv_connector_module_path, {})
    parts = transfer.kv_connector_extra_config.get("connectors")
    if not isinstance(parts, list) or not parts or not all(isinstance(p, dict) for p in parts):
        raise ValueError(f"{OPTION}: {SEVERAL} needs a list of 'connectors'; add one, or remove it")
    for unknown in sorted({key for part in parts for key in part} - PARTS_HAVE):
        raise ValueError(
            f"{OPTION}: 'connectors' of {SEVERAL} have no {unknown!r}; write it beside "
            f"{SEVERAL!r}, or remove it"
        )
    return parts


def _refuse_what_is_not_carried(vllm_config: VllmConfig, transfer: KVTransferConfig) -> None:
    """Refuse options next to the connector that would be ignored or are untested."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
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


def _check(name: str | None, path: str | None, extra: Mapping[str, Any]) -> None:
    """Refuse a connector that is not allowed, or settings that it does not have."""
    if path and path != MODULE:
        raise ValueError(f"{OPTION}: connector {name!r} of {path!r}: {UNKNOWN}; {REMEDY}")
    if name != ALLOWED:
        reason = REFUSED.get(str(name), UNKNOWN)
        raise ValueError(f"{OPTION}: connector {name!r}: {reason}; {REMEDY}")
    unknown = sorted(set(extra) - {"shared_storage_path"})
    if unknown:
        raise ValueError(
            f"{OPTION}: {ALLOWED} has no setting {unknown[0]!r}, only 'shared_storage_path'; "
            "remove it"
        )
