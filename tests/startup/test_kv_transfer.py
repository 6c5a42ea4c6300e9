"""The rule of who may carry keys and values: each of vLLM's connectors is decided by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from vllm_dllm.kv_transfer.connector import ExampleConnector
from vllm_dllm.startup.kv_transfer import ALLOWED, MODULE, check_kv_transfer


def settled(**transfer: Any) -> KVTransferConfig:
    config = KVTransferConfig(kv_role="kv_both", **transfer)
    check_kv_transfer(
        SimpleNamespace(  # type: ignore[arg-type]
            kv_transfer_config=config,
            cache_config=SimpleNamespace(kv_offloading_size=None, cache_dtype="auto"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        )
    )
    return config


@pytest.mark.parametrize("name", sorted(set(KVConnectorFactory._registry) - {ALLOWED}))
def test_vllms_other_connectors_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"connector '{name}': .* not final.*; choose {ALLOWED}"):
        settled(kv_connector=name)


def test_a_setting_that_we_do_not_read_is_refused() -> None:
    with pytest.raises(ValueError, match="enable_permute_local_kv"):
        settled(kv_connector=ALLOWED, enable_permute_local_kv=True)


def test_ours_is_made_by_the_factory() -> None:
    config = settled(kv_connector=ALLOWED)
    assert config.kv_connector_module_path == MODULE
    assert KVConnectorFactory.get_connector_class(config) is ExampleConnector
    # A configuration that is settled already may be settled again.
    again = settled(kv_connector=ALLOWED, kv_connector_module_path=MODULE)
    assert again.kv_connector_module_path == MODULE
