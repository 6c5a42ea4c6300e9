"""How many requests run together when nobody says, and how long a prompt may hold them up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform

from vllm_dllm.startup.default_limits import set_defaults


def limits(
    monkeypatch: pytest.MonkeyPatch,
    *,
    length: int,
    stock: tuple[int, int],
    given: tuple[bool, bool] = (False, False),
    context: int = 32768,
    on_cpu: bool = False,
    blocks: int = 1,
) -> tuple[int, int, int]:
    """Requests, tokens of a step and tokens of a prompt's chunk; a length of 256 is Gemma's."""
    platform = type(current_platform)
    monkeypatch.setattr(platform, "is_cpu", lambda self: on_cpu)
    model: Any = SimpleNamespace(
        hf_config=SimpleNamespace(canvas_length=length),
        max_model_len=context,
    )
    args = SimpleNamespace(
        diffusion_config=None,
        additional_config={"dllm": {"blocks": blocks}} if blocks > 1 else {},
        max_num_seqs=stock[0],
        max_num_batched_tokens=stock[1],
        long_prefill_token_threshold=0,
    )
    set_defaults(args, model, given, self_conditioned=length == 256)
    return args.max_num_seqs, args.max_num_batched_tokens, args.long_prefill_token_threshold


# vLLM's own defaults: `vllm serve` on an H200, `LLM` on an H200, `vllm serve` on smaller devices.
SERVER, OFFLINE, SMALL = (1024, 8192), (1024, 16384), (256, 2048)
ON_CPU: dict[str, Any] = {"stock": (128, 2048), "on_cpu": True}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"length": 32, "stock": SERVER}, (256, 8192, 0)),
        ({"length": 32, "stock": OFFLINE}, (256, 16384, 0)),
        ({"length": 32, "stock": SMALL}, (256, 8192, 2048)),
        ({"length": 256, "stock": SERVER}, (64, 16384, 8192)),
        ({"length": 256, "stock": OFFLINE}, (64, 16384, 0)),
        ({"length": 256, "stock": SMALL}, (64, 16384, 2048)),
        # What the user gave stays.
        ({"length": 256, "stock": SERVER, "given": (True, True)}, (1024, 8192, 0)),
        ({"length": 32, "stock": (512, 8192), "given": (True, False)}, (512, 16384, 8192)),
        # vLLM would not start with a chunk that is longer than the context.
        ({"length": 256, "stock": SERVER, "context": 4096}, (64, 16384, 0)),
        # On the CPU only the seats are lower.
        ({"length": 32, **ON_CPU}, (128, 4096, 0)),
        ({"length": 256, **ON_CPU}, (64, 16384, 0)),
        ({"length": 32, "blocks": 4, **ON_CPU}, (128, 16384, 0)),
    ],
)
def test_a_prompt_stalls_canvases_no_longer_than_by_vllm_s_defaults(
    given: dict[str, Any], expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limits(monkeypatch, **given) == expected
