"""Against vLLM's own class: the same tokens, and the same meaning of its request options."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.child import in_child
from tests.support.engine import engine
from tests.support.gemma_answers import IMAGES, ask
from tests.support.reference_gemma import COLD, VOCABULARY, random_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CANVAS = 32
PINNED = [0, 3, 17, 31]
IDS = [20, 30, 40, 50, 60]


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(15, VOCABULARY, (count,), generator=generator).tolist()


def cases() -> dict[str, dict[str, Any]]:
    """Every case gives the starting canvas: vLLM's class draws it from the global generator."""
    seed = tokens(CANVAS, 100)
    found: dict[str, dict[str, Any]] = {
        f"prompt-{n}-steps-{steps}": {
            "prompt": tokens(n, n),
            "extra": {"diffusion_seed_canvas": seed, "diffusion_max_steps": steps},
        }
        for n in (1, 10, 40, 100, 200)
        for steps in (1, 4)
    }
    narrow = {"diffusion_canvas_length": 12, "diffusion_seed_canvas": tokens(12, 7)}
    found["narrow"] = {
        "prompt": tokens(20, 5),
        "extra": narrow | {"diffusion_max_steps": 3},
        "max_tokens": 12,
    }
    found["read-only"] = {
        "prompt": tokens(20, 6),
        "extra": {
            "diffusion_seed_canvas": seed,
            "diffusion_read_only": True,
            "diffusion_max_steps": 2,
        },
    }
    found["narrow-read-only"] = {
        "prompt": tokens(9, 8),
        "extra": narrow | {"diffusion_max_steps": 1, "diffusion_read_only": True},
    }
    found["pinned"] = {
        "prompt": tokens(30, 9),
        "extra": {
            "diffusion_seed_canvas": seed,
            "diffusion_pinned": PINNED,
            "diffusion_max_steps": 3,
        },
    }
    read = {"diffusion_read_only": True, "diffusion_max_steps": 1} | narrow
    found["logprobs"] = {"prompt": tokens(9, 8), "extra": read, "logprobs": 3}
    found["more-logprobs"] = {"prompt": tokens(12, 8), "extra": read, "logprobs": 5}
    found["token-ids"] = {"prompt": tokens(9, 8), "extra": read, "logprob_token_ids": IDS[:4]}
    found["constrained"] = {
        "prompt": tokens(14, 8),
        "extra": read | {"diffusion_constrained": True},
        "logprob_token_ids": IDS,
    }
    found["filtered"] = {
        "prompt": tokens(25, 11),
        "extra": {"diffusion_seed_canvas": seed, "diffusion_max_steps": 3},
        "top_k": 5,
        "top_p": 0.8,
    }
    found["image"] = {"prompt": [], "image": 1, "extra": {"diffusion_seed_canvas": seed}}
    found["another-image"] = {"prompt": [], "image": 2, "extra": {"diffusion_seed_canvas": seed}}
    for case in found.values():
        case.setdefault("max_tokens", CANVAS)
    return found


def assert_same(name: str, got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["tokens"] == want["tokens"], name
    assert len(got["logprobs"]) == len(want["logprobs"]), name
    for mine, theirs in zip(got["logprobs"], want["logprobs"], strict=True):
        assert [token for token, _, _ in mine] == [token for token, _, _ in theirs], name
        assert [rank for _, _, rank in mine] == [rank for _, _, rank in theirs], name
        assert [lp for _, lp, _ in mine] == pytest.approx([lp for _, lp, _ in theirs], abs=2e-4)


def by_vllm(model: str, asked: list[dict[str, Any]]) -> Iterator[Any]:
    """What vLLM's own class answers, in a process of its own.

    The model's ``generation_config.json`` must be cold: this class has no other greedy mode.
    """
    with engine(Path(model), CANVAS, **IMAGES) as running:
        assert "vllm_dllm" not in type(running.runner.model).__module__
        for case in asked:
            yield ask(running, [case])[0]


def test_equals_vllms_own_class(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, seed=1, canvas=CANVAS, sliding_window=48)
    config = tmp_path / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | COLD))
    asked = cases()
    native = {"VLLM_DLLM_NATIVE": "1", "TORCH_COMPILE_DISABLE": "1"}
    wanted = in_child(by_vllm, tmp_path, list(asked.values()), env=os.environ | native)
    assert len(wanted) == len(asked)
    with engine(tmp_path, CANVAS, **IMAGES) as running:
        assert "vllm_dllm" in type(running.runner.model).__module__
        together = ask(running, list(asked.values()))
        alone = [ask(running, [case])[0] for case in asked.values()]
        running.assert_idle()
    # vLLM's class holds a pinned token while it denoises and emits its own guess all the same;
    # here what was pinned is what comes out.
    pinned = list(asked).index("pinned")
    held = {i: tokens(CANVAS, 100)[i] for i in PINNED}
    assert {i: together[pinned]["tokens"][i] for i in PINNED} == held
    wanted[pinned]["tokens"] = [held.get(i, t) for i, t in enumerate(wanted[pinned]["tokens"])]
    assert sum(bool(answer["logprobs"]) for answer in wanted) == 4
    seen = [wanted[list(asked).index(name)]["tokens"] for name in ("image", "another-image")]
    assert seen[0] != seen[1], "the image makes no difference"
    for name, want, got, single in zip(asked, wanted, together, alone, strict=True):
        assert_same(name, got, want)
        assert_same(name, single, want)
