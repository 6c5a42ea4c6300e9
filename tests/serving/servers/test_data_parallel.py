"""Two data-parallel engines behind one server give what the reference gives.

The ranks of mixtures of experts meet in every expert layer, so one without requests takes part in
the steps of the other. Dense engines know nothing of each other.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import CONTEXT, requests
from tests.support.reference_sdar import random_checkpoint
from tests.support.server import AS_SERVED, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

EXECUTION = '{"dllm": {"execution": "%s"}}'
ON = '{"dllm": {"fused_commit": "on", "execution": "%s"}}'
CASES: dict[str, tuple[bool, int, tuple[str, ...]]] = {
    "experts": (True, 8, ("--async-scheduling", "--additional-config", EXECUTION % "fdfo")),
    "experts, two blocks": (True, 4, ("--async-scheduling", "--additional-config", ON % "fdfo")),
    "experts, sync": (True, 4, ("--additional-config", EXECUTION % "sync")),
    "dense": (False, 4, ("--additional-config", EXECUTION % "fdfo")),
    "dense, two blocks": (False, 8, ("--async-scheduling", "--additional-config", ON % "sync")),
}


def by_two_engines(
    model: Path, flags: tuple[str, ...], log: Path, bodies: list[dict[str, Any]]
) -> list[list[int]]:
    """The tokens of each request, twice: on whichever rank, and beside whichever others."""
    flags = ("--data-parallel-size", "2", "--api-server-count", "1", *flags)
    with (
        Server(model, *flags, log=log, env=AS_SERVED, start_seconds=400) as server,
        ThreadPoolExecutor(6) as pool,
    ):
        found = list(pool.map(lambda body: server.complete(**body)["token_ids"], bodies * 2))
        text = server.client.get("/metrics").text
    counted = r'^vllm:request_success_total\{engine="(\d)".* (\S+)$'
    served = {rank for rank, count in re.findall(counted, text, re.MULTILINE) if float(count)}
    assert served == {"0", "1"}
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_engines_of_sdar(name: str, tmp_path: Path) -> None:
    experts, block, flags = CASES[name]
    model = random_checkpoint(tmp_path / "model", experts, block)
    asked = requests("sdar with experts" if experts else "sdar", model, block)
    bodies = [
        {
            "prompt": one.prompt,
            "max_tokens": one.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stop_token_ids": one.stop,
            "vllm_xargs": one.options,
        }
        for one in asked
    ]
    context = ("--max-model-len", str(CONTEXT))
    found = by_two_engines(model, (*context, *flags), tmp_path / "log", bodies)
    robust = [n for n, one in enumerate(asked * 2) if one.robust]
    assert [found[n] for n in robust] == [(asked * 2)[n].wanted.tokens for n in robust]
