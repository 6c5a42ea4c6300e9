"""Which models are soaked, and how they are served for it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.adapters import adapter
from tests.support.checkpoints import ROOT, TEXT_ONLY_FLAGS, TINY_GEMMA, TINY_LLADA2, TINY_SDAR
from tests.support.random_weights import state
from tests.support.reference_nemotron import random_checkpoint
from vllm_dllm.decoding import Corruption

MEGABYTE = 1 << 20
SEATS = 40
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens /reset_prefix_cache
    # The CPU's matrix library keeps a compiled kernel for each of the last 1024 shapes that it has
    # met, here 0.6 GB in 3000 requests: a growth that ends, and that would hide any other one.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1",
    # What is freed goes back at once: memory that glibc keeps for later would look like a leak.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "65536",
}


@dataclass(frozen=True)
class Model:
    """What is served.

    Attributes:
        corruption: what its canvases are full of, ``mask`` or ``uniform``.
        kv_bytes: memory for KV pages: enough for `SEATS` short requests, too little for long ones.
        adapters: names of LoRA adapters that are served beside the model.
    """

    path: Path
    corruption: Corruption
    kv_bytes: int
    reasoning: str = "granite"
    adapters: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    def command(self, scratch: Path) -> list[str]:
        """Flags of ``vllm serve``; small pages, so that requests come to need more of them.

        Adapters are written into the folder `scratch`.
        """
        return [
            *("--max-num-seqs", str(SEATS), "--block-size", "32"),
            *("--kv-cache-memory-bytes", str(self.kv_bytes)),
            *frontend_flags(self.reasoning),
            *adapter_flags(self.path, self.adapters, scratch),
            *self.flags,
        ]

    def slow(self) -> dict[str, Any]:
        """Options that take the most steps: such requests can be seen to run together."""
        if self.corruption == "uniform":
            return {"diffusion_stability_threshold": 1000}
        return {"diffusion_algorithm": "LowConfidence", "diffusion_threshold": 2.0}


def frontend_flags(reasoning: str) -> tuple[str, ...]:
    """Flags that let requests have tools and priorities, and answers have reasoning."""
    return (
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--reasoning-parser", reasoning, "--scheduling-policy", "priority"),
        *("--structured-outputs-config.enable_in_reasoning", "true"),
    )


def adapter_flags(model: Path, names: tuple[str, ...], scratch: Path) -> tuple[str, ...]:
    """Write adapters of these names into a folder; the flags that serve them."""
    if not names:
        return ()
    served = []
    for seed, name in enumerate(names):
        path = scratch / f"adapter-{name}"
        if not path.exists():
            adapter(model, path, seed)
        served.append(f"{name}={path}")
    return ("--enable-lora", "--max-loras", str(len(names)), "--lora-modules", *served)


NEMOTRON = ROOT / ".cache" / "nemotron"  # random weights, written when they are served


def write_nemotron() -> None:
    """Write a tiny Nemotron with the tokenizer of tiny-sdar, and its special tokens."""
    random_checkpoint(NEMOTRON, block=8)
    special = {"mask_token_id": 263, "eos_token_id": 258, "pad_token_id": 256}
    state(NEMOTRON, max_position_embeddings=2048, **special)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_SDAR / name, NEMOTRON / name)


MODELS = {
    "llada2": Model(TINY_LLADA2, "mask", 12 * MEGABYTE),
    "sdar": Model(TINY_SDAR, "mask", 12 * MEGABYTE, reasoning="qwen3", adapters=("a", "b")),
    "gemma": Model(TINY_GEMMA, "uniform", 9 * MEGABYTE, flags=TEXT_ONLY_FLAGS),
    "nemotron": Model(NEMOTRON, "mask", 12 * MEGABYTE),
}


def chosen(name: str) -> Model:
    if name == "nemotron":
        write_nemotron()
    if name in MODELS:
        return MODELS[name]
    config = json.loads((Path(name) / "config.json").read_text())
    (architecture,) = config["architectures"]
    family = {"DiffusionGemmaForBlockDiffusion": "gemma", "SDARForCausalLM": "sdar"}
    return replace(MODELS[family.get(architecture, "llada2")], path=Path(name))
