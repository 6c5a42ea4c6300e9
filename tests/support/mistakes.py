"""Mistakes of users as data: what was typed, and what the answer must say."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.support.checkpoints import TINY_GEMMA, TINY_LLADA2, TINY_SDAR

MODELS = {"LLaDA2": TINY_LLADA2, "SDAR": TINY_SDAR, "DiffusionGemma": TINY_GEMMA}
EVERY = tuple(MODELS)
MASKED, GEMMA = ("LLaDA2", "SDAR"), ("DiffusionGemma",)
# A sentence and a list of names; far less than a traceback.
MOST_CHARACTERS = 500


class Mistake(NamedTuple):
    """A mistake, for which families it is tried, and the parts of a readable answer to it.

    Attributes:
        typed: at start-up the options of an engine; in a request the fields of its body.
        named: how the answer calls what was typed wrongly.
        remedy: what the answer says to do; or what is right, where that says it.
        vllm: the message is vLLM's own, and good enough to be left alone.
    """

    families: tuple[str, ...]
    typed: dict[str, Any]
    named: str
    remedy: str
    vllm: bool = False

    @property
    def name(self) -> str:
        return str(self.typed)[:60]


def dllm(**settings: Any) -> dict[str, Any]:
    return {"additional_config": {"dllm": settings}}


def xargs(**options: Any) -> dict[str, Any]:
    return {"vllm_xargs": {f"diffusion_{name}": value for name, value in options.items()}}
