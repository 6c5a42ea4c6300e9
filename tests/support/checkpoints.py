"""The small trained checkpoints of this repository, and how they are served."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "tiny" / "checkpoints"
TINY_LLADA2 = TINY / "tiny-llada2"
TINY_GEMMA = TINY / "tiny-diffusiongemma"
TINY_SDAR = TINY / "tiny-sdar"
# DiffusionGemma without its vision tower's budget: flags of ``vllm serve``, options of an `LLM`.
TEXT_ONLY_FLAGS = ("--limit-mm-per-prompt", '{"image": 0, "video": 0}')
TEXT_ONLY_OPTIONS = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
