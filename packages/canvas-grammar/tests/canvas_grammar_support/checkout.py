"""Where the tests find tokenizers and schemas: in the repository that this package is part of."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
DATA = Path(__file__).resolve().parents[1] / "data"
TINY = ROOT / "examples" / "tiny" / "checkpoints"
TINY_LLADA2 = TINY / "tiny-llada2"
