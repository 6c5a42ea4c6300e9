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
from tests.support.engine import Engine, engine
from tests.support.reference_gemma import COLD, VOCABULARY, random_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

IMAGES = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "max_num_batched_tokens": 1024}


def picture(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(pixels.repeat(16, 0).repeat(16, 1))


def question(case: dict[str, Any]) -> dict[str, Any]:
    if "image" not in case:
        return {"prompt_token_ids": case["prompt"]}
    text = "<bos><|turn>user<|image|>what?<turn|><|turn>model"
    return {"prompt": text, "multi_modal_data": {"image": picture(case["image"])}}


def ask(running: Engine, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens, and for every token the reported [id, logprob, rank], of some cases together."""
    from vllm import SamplingParams

    own = ("prompt", "extra", "image")
    params = [
        SamplingParams(
            ignore_eos=True,
            extra_args=case["extra"],
            **{name: value for name, value in case.items() if name not in own},
        )
        for case in asked
    ]
    prompts = [question(case) for case in asked]
    answers = []
    for output in running.llm.generate(prompts, params, use_tqdm=False):
        one = output.outputs[0]
        reported = [
            sorted([token, info.logprob, info.rank] for token, info in position.items())
            for position in one.logprobs or []
        ]
        answers.append({"tokens": list(one.token_ids), "logprobs": reported})
    return answers


CANVAS = 32
PINNED = [0, 3, 17, 31]
IDS = [20, 30, 40, 50, 60]


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(15, VOCABULARY, (count,), generator=generator).tolist()


def cases() -> dict[str, dict[str, Any]]:
    """Every case gives the starting canvas: vLLM's class draws it from the global generator."""

    def case(prompt: list[int], steps: int, count: int = CANVAS, **more: Any) -> dict[str, Any]:
        names = [name for name in more if name.startswith("diffusion_")]
        extra = {name: more.pop(name) for name in names}
        canvas = {"diffusion_seed_canvas": tokens(CANVAS, 100), "diffusion_max_steps": steps}
        return {"prompt": prompt, "extra": canvas | extra, "max_tokens": count, **more}

    narrow = {"diffusion_canvas_length": 12, "diffusion_seed_canvas": tokens(12, 7)}
    only = {"diffusion_read_only": True}
    return {
        **{
            f"prompt-{n}-steps-{steps}": case(tokens(n, n), steps)
            for n in (1, 10, 40, 100, 200)
            for steps in (1, 4)
        },
        "narrow": case(tokens(20, 5), 3, 12, **narrow),
        "read-only": case(tokens(20, 6), 2, **only),
        "narrow-read-only": case(tokens(9, 8), 1, **narrow, **only),
        "pinned": case(tokens(30, 9), 3, diffusion_pinned=PINNED),
        "logprobs": case(tokens(9, 8), 1, logprobs=3, **narrow, **only),
        "more-logprobs": case(tokens(12, 8), 1, logprobs=5, **narrow, **only),
        "token-ids": case(tokens(9, 8), 1, logprob_token_ids=IDS[:4], **narrow, **only),
        "constrained": case(
            tokens(14, 8), 1, logprob_token_ids=IDS, diffusion_constrained=True, **narrow, **only
        ),
        "filtered": case(tokens(25, 11), 3, top_k=5, top_p=0.8),
        "image": case([], 4, image=1),
        "another-image": case([], 4, image=2),
    }


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
