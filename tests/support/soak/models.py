"""Which models are soaked, and how they are served for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.checkpoints import TEXT_ONLY_FLAGS, TINY_GEMMA, TINY_LLADA2
from tests.support.soak.rules import MEGABYTE

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
        path: the checkpoint.
        corruption: what its canvases are full of, ``mask`` or ``uniform``.
        kv_bytes: memory for KV pages: enough for `SEATS` short requests, too little for long ones.
        flags: more flags of ``vllm serve``.
    """

    path: Path
    corruption: str
    kv_bytes: int
    flags: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Flags of ``vllm serve``; small pages, so that requests come to need more of them."""
        return [
            *("--max-num-seqs", str(SEATS), "--block-size", "32"),
            *("--kv-cache-memory-bytes", str(self.kv_bytes)),
            *self.flags,
        ]

    def slow(self) -> dict[str, Any]:
        """Options that take the most steps: such requests can be seen to run together."""
        return SLOW[self.corruption]


MODELS = {
    "llada2": Model(TINY_LLADA2, "mask", 12 * MEGABYTE),
    "gemma": Model(TINY_GEMMA, "uniform", 9 * MEGABYTE, TEXT_ONLY_FLAGS),
}
SLOW = {
    "mask": {"diffusion_algorithm": "LowConfidence", "diffusion_threshold": 2.0},
    "uniform": {"diffusion_stability_threshold": 1000},
}


def chosen(name: str) -> Model:
    """One of `MODELS`, or a checkpoint by its path."""
    if name in MODELS:
        return MODELS[name]
    config = json.loads((Path(name) / "config.json").read_text())
    gemma = "DiffusionGemmaForBlockDiffusion" in config["architectures"]
    like = MODELS["gemma" if gemma else "llada2"]
    return Model(Path(name), like.corruption, like.kv_bytes, like.flags)
