"""LoRA adapters of random matrices."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter(model: Path, path: Path, seed: int, extra: str = "") -> Path:
    """Write an adapter of random matrices for every projection, and maybe for one module more."""
    path.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        if last not in (*PARTS, extra):
            continue
        # The matrix of an embedding is the other way round.
        rows, columns = weight.T.shape if last == "embed_tokens" else weight.shape
        down = torch.randn(RANK, columns, generator=generator) * columns**-0.5
        up = torch.randn(rows, RANK, generator=generator) * 0.3
        kind = "lora_embedding_" if last == "embed_tokens" else "lora_"
        end = "" if last == "embed_tokens" else ".weight"
        prefix = f"base_model.model.{module}.{kind}"
        tensors |= {f"{prefix}A{end}": down, f"{prefix}B{end}": up}
    save_file(tensors, path / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    stated |= {"target_modules": [*PARTS, extra][: 7 + bool(extra)], "task_type": "CAUSAL_LM"}
    (path / "adapter_config.json").write_text(json.dumps(stated))
    return path
