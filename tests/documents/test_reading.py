"""The reader of code blocks and commands, on pages that are planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT
from tests.support.documents.commands import Block, Command, blocks, commands, pages
from tests.support.documents.running import asks_a_server, filled_in, shortened, unknown
from tests.support.documents.table import TINY, Row

PAGE = """# Title

Serve it:

    vllm serve MODEL --max-model-len 1024 \\
      --enforce-eager      # any model
    # a comment alone

- a list
    goes on here

    - and is not code

```python
print("a")
```

~~~
what it prints
~~~
"""


def test_blocks(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(PAGE)
    found = blocks("docs/page.md", tmp_path)
    assert [(block.line, block.language) for block in found] == [(5, ""), (14, "python"), (18, "")]
    (command,) = commands(found[0])
    assert command.words == ["vllm", "serve", "MODEL", "--max-model-len", "1024", "--enforce-eager"]
    assert command.program == "vllm serve" and command.line == 5
    assert pages(tmp_path)[-1] == "docs/page.md"


def test_docstrings(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""What it is.\n\n    python a.py\n"""\nb = "    python b.py"\n'
    )
    (block,) = blocks("a.py", tmp_path)
    assert [command.text for command in commands(block)] == ["python a.py"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=1 B='2 3' .venv/bin/python -m x", [".venv/bin/python", "-m", "x"]),
        ("python a.py > out.txt", ["python", "a.py"]),
        ("python -m venv e && e/bin/pip install x", ["python", "-m", "venv", "e"]),
        ('curl u -d \'{\n  "a": ["b"]}\'', ["curl", "u", "-d", '{\n  "a": ["b"]}']),
        ("A=...  # to be filled in", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    (command,) = commands(Block("p", 1, "", text))
    assert command.words == words


def test_a_block_ends_with_its_last_command() -> None:
    first, second = commands(Block("p", 7, "", "curl a -d '{\n}'\nmake demo\n"))
    assert (first.line, second.line, second.program) == (7, 9, "make demo")
    with pytest.raises(ValueError, match="does not end"):
        commands(Block("p", 1, "", "curl a -d '{"))


def test_what_a_reader_fills_in() -> None:
    assert filled_in("vllm serve MODEL") == f"vllm serve {TINY}/tiny-llada2"
    assert filled_in("serve JetLM/SDAR-4B-Chat-b16 x") == f"serve {TINY}/tiny-sdar x"
    assert filled_in('"google/diffusiongemma-26B-A4B-it"') == f'"{TINY}/tiny-diffusiongemma"'
    for same in ("MODELS", "a/MODEL", "--OUT-x", "OUTPUT"):
        assert filled_in(same) == same
    demo = Command("p", 1, "python -m examples.tiny.train_sdar OUT")
    assert shortened(demo) == "python -m examples.tiny.train_sdar out --steps 2 --held-out 1"


def test_an_unknown_program_is_found() -> None:
    planted = [Command("docs/new.md", n, text) for n, text in enumerate(("docker build .", "A=1"))]
    assert unknown(planted) == ["docs/new.md:0: docker build .", "docs/new.md:1: A=1"]
    assert unknown([Command("docs/new.md", 1, "vllm serve MODEL")]) == []


def test_rows() -> None:
    row = Row("README.md", "pip install", "why")
    assert row.matches("README.md", "  pip install x") and not row.matches(
        "docs/a.md", "pip install"
    )
    assert Row(None, "pip", "why").matches("docs/a.md", "pip install")


def test_who_asks_a_server() -> None:
    for text in ("curl localhost:8000/health", "vllm chat", "python examples/tools.py"):
        assert asks_a_server(Command("p", 1, text)), text
    assert not asks_a_server(Command("p", 1, "python examples/offline.py"))
    assert (ROOT / "examples" / "tools.py").is_file()
