"""The table of routes in docs/attention.md is what the function answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.checkpoints import ROOT
from tests.support.routes import DEVICES, GEMMA, GEMMA_REFERENCE, LLADA2
from vllm_dllm.attention.routes import Options, RouteError, choose_route

COLUMNS = {
    "LLaDA2": (LLADA2, "auto"),
    "LLaDA2, `fp8`": (LLADA2, "fp8"),
    "DiffusionGemma": (GEMMA, "auto"),
    "DiffusionGemma, `fp8`": (GEMMA, "fp8"),
    "`window=reference`": (GEMMA_REFERENCE, "auto"),
}
SHOWN = ("SM80", "SM89", "SM90", "SM100", "SM120", "ROCm", "CPU")


def row(name: str) -> str:
    """A device's line of the table."""
    cells = [name]
    for model, kv_cache_dtype in COLUMNS.values():
        try:
            route = choose_route(DEVICES[name], model, Options(kv_cache_dtype=kv_cache_dtype))
        except RouteError:
            cells.append("refused")
            continue
        version = f" {route.flash_version}" if route.flash_version else ""
        page = f" ({route.page_size})" if route.page_size else ""
        cells.append(f"`{route.backend}`{version}, {route.method}{page}")
    return "| " + " | ".join(cells) + " |"


@pytest.mark.parametrize("name", SHOWN)
def test_the_table(name: str) -> None:
    assert row(name) in (ROOT / "docs" / "attention.md").read_text("utf-8").splitlines()


def test_devices_that_are_not_shown_are_alike() -> None:
    assert row("SM86").replace("SM86", "SM80") == row("SM80")
    with_triton = replace(DEVICES["CPU"], triton=True)
    assert choose_route(with_triton, LLADA2, Options()).backend == "CPU_ATTN"


if __name__ == "__main__":
    print("| device | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    print(*map(row, SHOWN), sep="\n")
