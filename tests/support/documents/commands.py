"""The code blocks of the documentation, and the commands in them."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt

from tests.support.checkpoints import ROOT

AT_THE_TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
COMMENT = re.compile(r"\s+# [^'\"\n]*$")  # after a command
# Two words that name a command together: `vllm serve`, `vllm-dllm check`, `make demo`.
WITH_SUBCOMMAND = ("vllm", "vllm-dllm", "make", "pip", "docker")


def pages() -> list[str]:
    """The documents whose commands are run: Markdown, and the docstrings of the examples."""
    docs = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    examples = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*.py"))
    return [*AT_THE_TOP, *docs, *examples]


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a shell, with the lines that continue it."""

    page: str
    line: int
    text: str

    @cached_property
    def words(self) -> list[str]:
        """The command and its arguments, without quotes, comments, variables and what follows it.

        Only the first of several commands (`a && b`, `a > file`) counts.
        """
        text = self.text.replace("\\\n", " ")
        lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        found: list[str] = []
        for word in lexer:
            if word in ("&&", "||", ";", "|", ">", ">>"):
                break
            if found or not ASSIGNMENT.match(word):
                found.append(word)
        return found

    @property
    def program(self) -> str:
        """`vllm serve`, `make demo`, `python`, `curl`; empty where only variables are set."""
        if not self.words:
            return ""
        name = Path(self.words[0]).name
        if name in WITH_SUBCOMMAND and len(self.words) > 1:
            return f"{name} {self.words[1]}"
        return "python" if re.fullmatch(r"python[\d.]*", name) else name

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"


def blocks(page: str) -> list[Block]:
    """The indented and fenced code blocks of a page."""
    text = (ROOT / page).read_text("utf-8")
    if page.endswith(".py"):
        text = ast.get_docstring(ast.parse(text), clean=False) or ""
    found = []
    for token in MarkdownIt("commonmark").parse(text):
        if token.type in ("fence", "code_block"):
            begin = token.map[0] + 1 if token.map else 0
            language = token.info.split()[0] if token.info else ""
            found.append(Block(page, begin, language, token.content))
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a block of shell; a line that leaves a quote open goes on in the next one.

    Raises:
        ValueError: the last command does not end.
    """
    found, begun, begin = [], "", 0
    for number, line in enumerate(block.text.splitlines(), block.line):
        begin, begun = (begin, f"{begun}\n{line}") if begun else (number, line)
        if not begun.strip() or begun.lstrip().startswith("#"):
            begun = ""
        elif complete(begun):
            found.append(Command(block.page, begin, COMMENT.sub("", begun.strip())))
            begun = ""
    if begun:
        raise ValueError(f"{block.page}:{begin}: {begun!r} does not end")
    return found


def complete(text: str) -> bool:
    """Whether a shell would run this text, rather than ask for the next line."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return not text.endswith("\\")


def inline_commands(page: str, program: str) -> Iterator[Command]:
    for number, line in enumerate((ROOT / page).read_text("utf-8").splitlines(), 1):
        for text in re.findall(rf"(?<!`)`({program} [^`]+)`", line):
            yield Command(page, number, text)
