"""The rule of who may carry keys and values: each of vLLM's connectors is decided by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from vllm_dllm.kv_transfer.connector import ExampleConnector
from vllm_dllm.startup.kv_transfer import ALLOWED, MODULE, REFUSED, SEVERAL, check_kv_transfer


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


def test_every_connector_of_vllm_is_decided() -> None:
    assert {ALLOWED, SEVERAL, *REFUSED} == set(KVConnectorFactory._registry)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refusal_names_connector_reason_and_remedy(name: str) -> None:
    with pytest.raises(ValueError, match=f"connector '{name}': {REFUSED[name]}; choose {ALLOWED}"):
        settled(kv_connector=name)


def test_ours_is_made_by_the_factory() -> None:
    config = settled(kv_connector=ALLOWED)
    assert config.kv_connector_module_path == MODULE
    assert KVConnectorFactory.get_connector_class(config) is ExampleConnector
    # A configuration that is settled already may be settled again.
    again = settled(kv_connector=ALLOWED, kv_connector_module_path=MODULE)
    assert again.kv_connector_module_path == MODULE


def test_several_are_ours_each() -> None:
    parts = [{"kv_connector": ALLOWED, "kv_role": "kv_both"} for _ in range(2)]
    config = settled(kv_connector=SEVERAL, kv_connector_extra_config={"connectors": parts})
    assert config.kv_connector_module_path is None
    assert [part["kv_connector_module_path"] for part in parts] == [MODULE, MODULE]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_connector": None}, "connector None"),
        ({"kv_connector": SEVERAL, "kv_connector_module_path": "mine"}, "of 'mine'"),
        ({"kv_connector": SEVERAL, "kv_connector_extra_config": {"connectors": [3]}}, "list"),
        (
            {
                "kv_connector": SEVERAL,
                "kv_connector_extra_config": {"connectors": [{"kv_connector": SEVERAL}]},
            },
            f"connector '{SEVERAL}'",
        ),
        ({"kv_connector": ALLOWED, "enable_permute_local_kv": True}, "enable_permute_local_kv"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settled(**changes)
