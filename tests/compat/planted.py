"""A vLLM in small, and what can be changed in it."""

from __future__ import annotations

from pathlib import Path

FILES = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "__version__ = version = '1.2.0+cpu'\n",
    "vllm/config/__init__.py": "from vllm.config.engine import EngineConfig\n",
    "vllm/config/engine.py": '''
from dataclasses import dataclass

from vllm.model import Model


@dataclass
class EngineConfig:
    """All of it."""

    model: Model
    size: int = 1

    @property
    def double(self) -> int:
        """Twice the size."""
        return 2 * self.size  # as promised


def current() -> EngineConfig:
    return EngineConfig(Model("x"))
''',
    "vllm/model.py": '''
import enum

from json import loads


class Kind(enum.Enum):
    TEXT = 1

    def readable(self) -> bool:
        return True


class Root:
    def load(self, path: str) -> None:
        """Load it."""
        self.path = path


class Model(Root):
    kind = Kind.TEXT

    def __init__(self, name: str) -> None:
        self.name = name

    def step(self, tokens: int) -> int:
        return tokens


try:
    from fast import work
except ImportError:

    def work(x):
        return x
''',
}


def plant(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """Write the files into a folder, each change being a file, a text in it, and another text."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for changed, old, new in changes:
            if changed == name:
                assert old in text
                text = text.replace(old, new)
        path.write_text(text)
    return folder
