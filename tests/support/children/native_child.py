"""vLLM's own DiffusionGemma class, in a process of its own: prints answers as JSON.

    python -m tests.support.children.native_child MODEL '[{"prompt": [...], "extra": {...}}, ...]'

The model's ``generation_config.json`` must be cold: this class has no other greedy mode.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["VLLM_DLLM_NATIVE"] = "1"
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    from tests.support.engine import engine
    from tests.support.gemma_answers import IMAGES, ask

    with engine(Path(sys.argv[1]), 32, **IMAGES) as running:
        assert "vllm_dllm" not in type(running.runner.model).__module__
        for case in json.loads(sys.argv[2]):
            print(json.dumps(ask(running, [case])[0]), flush=True)
