"""What a package uses of vLLM is found by reading it, however roundabout it gets there."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from vllm_dllm.compat.scan import Scan

WRAPPING = "vllm_patches/wrapping.py"


def scan(folder: Path, **files: str) -> Scan:
    """The scan of a package `vllm_dllm` with these modules and the helper that wraps."""
    package = folder / "vllm_dllm"
    texts = {"vllm_patches/wrapping": "def wrap(owner, name, decorator):\n    ...\n"} | files
    for name, text in texts.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return Scan(package)


def how(scan: Scan, path: str) -> set[str]:
    return {use.how for use in scan.uses.get(path, ())}


WRAP = "from vllm_dllm.vllm_patches.wrapping import wrap\n"


@pytest.mark.parametrize(
    ("text", "wrapped"),
    [
        ("from vllm.a import C\nwrap(C, 'f', d)", "vllm.a:C.f"),
        ("from vllm import config as c\nwrap(c, 'f', d)", "vllm:config.f"),
        ("import sys\nm = sys.modules.get('vllm.a')\nif m:\n    wrap(m.C, 'f', d)", "vllm.a:C.f"),
        ("import sys\nwrap(sys.modules['vllm.a'].C, 'f', d)", "vllm.a:C.f"),
        ("def g(client):\n    wrap(client, 'f', d)\nfrom vllm.a import C\ng(C)", "vllm.a:C.f"),
        (
            "from importlib import import_module\nROOT = 'vllm.a'\n"
            "for part, name in (('b', 'f'), ('c', 'g')):\n"
            "    wrap(import_module(f'{ROOT}.{part}'), name, d)",
            "vllm.a.c:g",
        ),
        (
            "from typing import NamedTuple\nfrom importlib import import_module\n"
            "class End(NamedTuple):\n    module: str\n    cls: str\n"
            "ENDS = (End('vllm.a', 'C'),)\n"
            "def each():\n    for end in ENDS:\n        one(end)\n"
            "def one(end: End):\n    wrap(getattr(import_module(end.module), end.cls), 'f', d)\n",
            "vllm.a:C.f",
        ),
        (
            "from vllm.platforms import current_platform\nwrap(type(current_platform), 'f', d)",
            "vllm.platforms:current_platform.f",
        ),
    ],
)
def test_the_target_of_a_wrapper(tmp_path: Path, text: str, wrapped: str) -> None:
    found = scan(tmp_path, a=WRAP + text)
    assert "wrapped" in how(found, wrapped)
    assert found.unknown_wraps == []


def test_loops_keep_what_belongs_together(tmp_path: Path) -> None:
    text = (
        "import importlib\nKERNELS = {'a.f': 1, 'b.g': 2}\n"
        "for path in KERNELS:\n    module, name = path.rsplit('.', 1)\n"
        "    getattr(importlib.import_module(f'vllm.{module}'), name, None)\n"
    )
    found = scan(tmp_path, a=text)
    assert found.uses.keys() == {"vllm.a", "vllm.b", "vllm.a:f", "vllm.b:g"}


def test_a_wrapper_of_something_unknown_is_told(tmp_path: Path) -> None:
    found = scan(tmp_path, a=WRAP + "import json\n\ndef f(x):\n    wrap(x, 'f', json.loads)\n")
    assert found.unknown_wraps == ["vllm_dllm/a.py:5"]


def test_what_a_wrapper_does_with_its_instance(tmp_path: Path) -> None:
    text = """
        from vllm.a import C

        def decorate(original):
            def wrapper(self, *args):
                if self.engine.errored:
                    return original(self, *args)
            return wrapper

        wrap(C, "f", decorate)
    """
    found = scan(tmp_path, a=WRAP + textwrap.dedent(text))
    assert how(found, "vllm.a:C().engine.errored") == {"used"}


def test_classes(tmp_path: Path) -> None:
    text = """
        from vllm.a import Base
        from vllm_dllm.mixin import Mixin

        class Ours(Mixin, Base):
            def step(self, request):
                return super().step(request) + self.limit + self.own

            @property
            def own(self):
                return 1
    """
    mixin = "class Mixin:\n    def rule(self):\n        return self.budget\n"
    found = scan(tmp_path, a=text, mixin=mixin)
    assert how(found, "vllm.a:Base") == {"imported", "subclassed"}
    assert how(found, "vllm.a:Base.step") == {"overridden", "used"}
    assert how(found, "vllm.a:Base.rule") == {"overridden"}
    assert how(found, "vllm.a:Base().limit") == {"used"}
    assert how(found, "vllm.a:Base().budget") == {"used"}
    assert "vllm.a:Base().own" not in found.uses


def test_annotations_and_fields(tmp_path: Path) -> None:
    text = """
        from __future__ import annotations
        from typing import TYPE_CHECKING

        if TYPE_CHECKING:
            from vllm.a import Config, Request

        class Holder:
            def __init__(self, config: Config) -> None:
                self.config = config

            def read(self) -> int:
                return self.config.model.size

        def of(requests: list[Request], last: Request | None) -> None:
            for request in requests:
                request.tokens
            last.end
    """
    found = scan(tmp_path, a=text)
    assert how(found, "vllm.a:Config().model.size") == {"used"}
    assert how(found, "vllm.a:Request().tokens") == {"used"}
    assert how(found, "vllm.a:Request().end") == {"used"}


def test_a_recursive_function_ends(tmp_path: Path) -> None:
    text = "from vllm.a import C\ndef f(x, y):\n    return f(x, (x, y))\nf(C, ())\n"
    assert how(scan(tmp_path, a=text), "vllm.a:C") == {"imported"}
