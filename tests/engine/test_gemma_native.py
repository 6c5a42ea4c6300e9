"""Against vLLM's own class: the same tokens, and the same meaning of its request options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import engine
from tests.reference_gemma import COLD, VOCABULARY, random_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CANVAS = 32
PINNED = [0, 3, 17, 31]
CHILD = (sys.executable, "-m", "tests.engine.native_child")


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(12, VOCABULARY, (count,), generator=generator).tolist()


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
    for case in found.values():
        case.setdefault("max_tokens", CANVAS)
    return found


def test_equals_vllms_own_class(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, seed=1, canvas=CANVAS, sliding_window=48)
    config = tmp_path / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | COLD))
    asked = cases()
    child = subprocess.run(
        [*CHILD, str(tmp_path), json.dumps(list(asked.values()))],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    lines = [line for line in child.stdout.splitlines() if line.startswith("[")]
    wanted = [json.loads(line) for line in lines]
    assert len(wanted) == len(asked)
    from vllm import SamplingParams

    with engine(tmp_path, CANVAS, limit_mm_per_prompt={"image": 0, "video": 0}) as running:
        assert "vllm_dllm" in type(running.runner.model).__module__
        params = [
            SamplingParams(max_tokens=case["max_tokens"], ignore_eos=True, extra_args=case["extra"])
            for case in asked.values()
        ]
        prompts = [case["prompt"] for case in asked.values()]
        together = [got for got, _ in running.generate(prompts, params)]
        alone = [
            running.generate([prompt], [one])[0][0]
            for prompt, one in zip(prompts, params, strict=True)
        ]
        running.assert_idle()
    # vLLM's class holds a pinned token while it denoises and emits its own guess all the same;
    # here what was pinned is what comes out.
    pinned = list(asked).index("pinned")
    held = {i: tokens(CANVAS, 100)[i] for i in PINNED}
    assert {i: together[pinned][i] for i in PINNED} == held
    wanted[pinned] = [held.get(i, token) for i, token in enumerate(wanted[pinned])]
    for name, want, got, single in zip(asked, wanted, together, alone, strict=True):
        assert got == want, name
        assert single == want, name
