"""Mistakes in options that move keys and values, rows of `test_start_up.py`."""

from __future__ import annotations

from typing import Any

from tests.support.mistakes import EVERY, GEMMA, MASKED, Mistake


def connector(name: str, extra: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra or {}}
    return {"kv_transfer_config": config | keys}


CHOOSE = "choose ExampleConnector, or remove it"
TRANSFERS = [
    Mistake(
        EVERY,
        connector("NixlConnector"),
        "--kv-transfer-config: connector 'NixlConnector': it would move keys and values",
        CHOOSE,
    ),
    Mistake(MASKED, connector("MyConnector"), "connector 'MyConnector': it would", CHOOSE),
    Mistake(
        GEMMA,
        connector("ExampleConnector", kv_connector_module_path="mine.example"),
        "'ExampleConnector' of 'mine.example'",
        CHOOSE,
    ),
    Mistake(
        GEMMA,
        connector("ExampleConnector", {"shared_path": "/tmp"}),
        "no setting 'shared_path', only 'shared_storage_path'",
        "remove it",
    ),
    Mistake(
        MASKED,
        connector("ExampleConnector") | {"tensor_parallel_size": 2},
        "--kv-transfer-config",
        "remove it, or --tensor-parallel-size",
    ),
    Mistake(EVERY, {"kv_offloading_size": 1.0}, "--kv-offloading-size 1.0", "remove it"),
]
