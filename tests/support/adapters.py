"""LoRA adapters of random matrices, and checkpoints with the adapter in their weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LLADA2_PARTS = ("query_key_value", "dense")
# Modules that are adapted only if a test asks for them, because no engine adapts them.
NOT_ADAPTED = frozenset({"experts", "self_conditioning", "vision_tower"})


def adapter(model: Path, path: Path, seed: int, extra: str = "") -> Path:
    """An adapter of random matrices for all dense projections, and modules called `extra`."""
    path.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        parts = module.split(".")
        usual = parts[-1] in (*PARTS, *LLADA2_PARTS) and NOT_ADAPTED.isdisjoint(parts)
        if weight.ndim != 2 or not (usual or extra in parts):
            continue
        # The matrix of an embedding is the other way round.
        embeds = parts[-1] == "embed_tokens"
        rows, columns = weight.T.shape if embeds else weight.shape
        down = torch.randn(RANK, columns, generator=generator) * columns**-0.5
        up = torch.randn(rows, RANK, generator=generator) * 0.3
        kind = "lora_embedding_" if embeds else "lora_"
        end = "" if embeds else ".weight"
        prefix = f"base_model.model.{module}.{kind}"
        tensors |= {f"{prefix}A{end}": down, f"{prefix}B{end}": up}
    write(path, tensors)
    return path


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the files of an adapter, as PEFT does."""
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    targets = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors})
    stated |= {"target_modules": targets, "task_type": "CAUSAL_LM"}
    (path / "adapter_config.json").write_text(json.dumps(stated))


def merged(model: Path, adapted: Path, path: Path) -> Path:
    """A checkpoint whose weights hold the adapter."""
    shutil.copytree(model, path)
    weights = load_file(model / "model.safetensors")
    parts = load_file(adapted / "adapter_model.safetensors")
    for name, down in parts.items():
        module, _, kind = name.removeprefix("base_model.model.").partition(".lora_")
        if kind.startswith(("A", "embedding_A")):
            up = parts[name.replace("_A", "_B")]
            more = up @ down * (ALPHA / RANK)
            weights[f"{module}.weight"] += more.T if kind.startswith("embedding") else more
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path
