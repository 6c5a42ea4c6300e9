"""Two data-parallel engines that serve SDAR behind one server, against `transformers`.

Dense engines know nothing of each other; with experts they meet in every layer, see
`test_data_parallel`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serving.servers.test_data_parallel import requests_of_engines
from tests.support.families import CONTEXT, Asked, requests
from tests.support.reference_sdar import random_checkpoint
from tests.support.server import AS_SERVED, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = (
    *("--data-parallel-size", "2", "--api-server-count", "1"),
    *("--max-model-len", str(CONTEXT)),
)
EXECUTION = '{"dllm": {"execution": "%s"}}'
ON = '{"dllm": {"fused_commit": "on", "execution": "%s"}}'
CASES: dict[str, tuple[bool, int, tuple[str, ...]]] = {
    "experts": (True, 8, ("--async-scheduling", "--additional-config", EXECUTION % "fdfo")),
    "experts, two blocks": (True, 4, ("--async-scheduling", "--additional-config", ON % "fdfo")),
    "experts, sync": (True, 4, ("--additional-config", EXECUTION % "sync")),
    "dense": (False, 4, ("--additional-config", EXECUTION % "fdfo")),
    "dense, two blocks": (False, 8, ("--async-scheduling", "--additional-config", ON % "sync")),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_two_engines(name: str, tmp_path: Path) -> None:
    experts, block, flags = CASES[name]
    model = random_checkpoint(tmp_path / "model", experts, block)
    asked = requests("sdar with experts" if experts else "sdar", model, block)

    def complete(request: Asked) -> list[int]:
        body = {
            "temperature": 0,
            "ignore_eos": True,
            "stop_token_ids": request.stop,
            "vllm_xargs": request.options,
        }
        found = server.complete(request.prompt, request.max_tokens, **body)
        return found["token_ids"]

    with (
        Server(
            model, *FLAGS, *flags, log=tmp_path / "log", env=AS_SERVED, start_seconds=400
        ) as server,
        ThreadPoolExecutor(6) as pool,
    ):
        # Twice each: whichever rank a request comes to, and beside whichever others.
        found = list(pool.map(complete, asked * 2))
        served = requests_of_engines(server)
    different = [
        n
        for n, (tokens, one) in enumerate(zip(found, asked * 2, strict=True))
        if one.robust and tokens != one.wanted.tokens
    ]
    assert not different
    assert set(served) == {"0", "1"}
    assert min(served.values()) > 0
