"""The demo's checkpoint: reproducible, and complete enough for vLLM."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
make_twin = runpy.run_path(str(ROOT / "examples" / "tiny" / "make_twin.py"))["make_twin"]
SMALL = {"hidden": 64, "layers": 2, "vocabulary": 128}


def test_a_seed_is_a_checkpoint(tmp_path: Path) -> None:
    made = [
        make_twin(tmp_path / name, seed, **SMALL) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    a, b, c = ((path / "model.safetensors").read_bytes() for path in made)
    assert a == b != c


def test_tokenizer_and_chat_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_twin(tmp_path, 1, **SMALL))
    assert tokenizer.mask_token_id == 127
    assert tokenizer.decode(tokenizer.encode("bada bade")) == "bada bade"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "bada"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<role> HUMAN </role> bada <|role_end|> <role> ASSISTANT </role>"
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"mask_token_id", "block_length", "canvas_length"} & set(config)
