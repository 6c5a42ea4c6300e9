"""LoRA on a dense SDAR: each request has the adapter that it names, or none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engine import Engine, engine, greedy
from tests.support.reference_sdar import Reference, Rule, random_checkpoint

pytestmark = pytest.mark.engine

RANK, ALPHA, BLOCK = 4, 8, 4
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MARGIN = 3e-5
# Whole pages that both would find in the cache if it did not know adapters apart.
PROMPTS = [[(13 * i + 5 * n) % 290 for i in range(64 + n)] for n in (0, 1, 3, 6)]
TOKENS = 21


def write_adapter(model: Path, place: Path, merged: Path, seed: int) -> None:
    """An adapter of random matrices, and the checkpoint into which it is merged."""
    place.mkdir()
    weights, draw = load_file(model / "model.safetensors"), torch.Generator().manual_seed(seed)
    adapter = {}
    for name, weight in weights.items():
        if name.split(".")[-2] not in MATRICES:
            continue
        down = torch.randn(RANK, weight.shape[1], generator=draw) * weight.shape[1] ** -0.5
        up = torch.randn(weight.shape[0], RANK, generator=draw) * 0.6
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        adapter |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
        weights[name] = weight + ALPHA / RANK * up @ down
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    config |= {"target_modules": list(MATRICES), "task_type": "CAUSAL_LM"}
    save_file(adapter, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(json.dumps(config))
    merged.mkdir()
    for file in model.iterdir():
        (merged / file.name).write_bytes(file.read_bytes())
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The base model, two adapters, and what they are merged into."""
    place = tmp_path_factory.mktemp("lora")
    base = random_checkpoint(place / "base", experts=False, block=BLOCK)
    for seed, name in enumerate(("first", "second")):
        write_adapter(base, place / name, place / f"{name} merged", seed)
    return {"base": base, "first": place / "first", "second": place / "second"}


@pytest.fixture(
    scope="module",
    params=[{}, {"async_scheduling": True, "additional_config": {"dllm": {"fused_commit": "on"}}}],
    ids=["granted", "two-blocks"],
)
def running(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[Engine]:
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    options |= {"block_size": 32, "diffusion_config": None}
    with engine(models["base"], BLOCK, **options, **request.param) as started:
        yield started


def test_each_request_has_its_own_adapter(running: Engine, models: dict[str, Path]) -> None:
    """Catches an adapter that others get, that prompts or canvases miss, and pages that are shared
    between adapters."""
    from vllm.lora.request import LoRARequest

    adapters = {
        "base": None,
        "first": LoRARequest("first", 1, str(models["first"])),
        "second": LoRARequest("second", 2, str(models["second"])),
    }
    wanted = {}
    for name, adapter in adapters.items():
        path = models["base"] if adapter is None else models[name].with_name(f"{name} merged")
        reference = Reference(path)
        wanted[name] = [reference.generate(p, TOKENS, Rule(), BLOCK) for p in PROMPTS]
    assert len({tuple(each[0].tokens) for each in wanted.values()}) == 3
    asked = [(name, n) for n in range(len(PROMPTS)) for name in adapters]
    for _ in range(2):  # the second time prompts come out of the cache
        outputs = running.llm.generate(
            [{"prompt_token_ids": PROMPTS[n]} for _, n in asked],
            [greedy(TOKENS, ignore_eos=True)] * len(asked),
            lora_request=[adapters[name] for name, _ in asked],
            use_tqdm=False,
        )
        different = [
            (name, n)
            for (name, n), output in zip(asked, outputs, strict=True)
            if wanted[name][n].margin > MARGIN
            and list(output.outputs[0].token_ids) != wanted[name][n].tokens
        ]
        assert not different
    assert sum(a.margin > MARGIN for each in wanted.values() for a in each) >= 10
    running.assert_idle()


def test_an_adapter_of_the_head_is_refused(running: Engine, models: dict[str, Path]) -> None:
    """vLLM would apply it to one row of logits for each request."""
    from vllm.lora.request import LoRARequest

    place = models["first"].with_name("with head")
    place.mkdir(exist_ok=True)
    tensors = load_file(models["first"] / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.ones(RANK, 64)
    tensors["base_model.model.lm_head.lora_B.weight"] = torch.ones(300, RANK)
    save_file(tensors, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(
        (models["first"] / "adapter_config.json").read_text()
    )
    with pytest.raises(ValueError, match="lm_head"):
        running.llm.llm_engine.add_lora(LoRARequest("head", 9, str(place)))
