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


@pytest.mark.parametrize(
    ("length", "stock", "expected"),
    [
        (32, SERVER, (256, 8192, 0)),
        (32, OFFLINE, (256, 16384, 0)),
        (32, SMALL, (256, 8192, 2048)),
        (256, SERVER, (64, 16384, 8192)),
        (256, OFFLINE, (64, 16384, 0)),
        (256, SMALL, (64, 16384, 2048)),
    ],
)
def test_a_prompt_stalls_canvases_no_longer_than_by_vllm_s_defaults(
    length: int,
    stock: tuple[int, int],
    expected: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seats, budget, chunk = limits(monkeypatch, length=length, stock=stock)
    assert (seats, budget, chunk) == expected
    assert seats * length <= budget
    assert (chunk or budget) <= max(stock[1], length)


def test_what_the_user_gave_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    both = limits(monkeypatch, length=256, stock=(1024, 8192), given=(True, True))
    assert both == (1024, 8192, 0)
    seats = limits(monkeypatch, length=32, stock=(512, 8192), given=(True, False))
    assert seats == (512, 16384, 8192)


def test_a_chunk_is_not_limited_to_more_than_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would refuse to start."""
    assert limits(monkeypatch, length=256, stock=SERVER, context=4096) == (64, 16384, 0)


def test_on_the_cpu_only_the_seats_are_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits(monkeypatch, length=32, stock=(128, 2048), on_cpu=True) == (128, 4096, 0)
    assert limits(monkeypatch, length=256, stock=(128, 2048), on_cpu=True) == (64, 16384, 0)
    several = limits(monkeypatch, length=32, stock=(128, 2048), on_cpu=True, blocks=4)
    assert several == (128, 16384, 0)
