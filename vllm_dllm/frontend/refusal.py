"""The error about a parameter, and the name of one that several refusals have."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError

# What `constraining_field` calls the tools of which one is strict.
STRICT = "tools.strict"


def refused(name: str, sentence: str, value: Any = None) -> VLLMValidationError:
    """The error, status 400 over HTTP, about a parameter: its name, and what follows that."""
    return VLLMValidationError(f"{name} {sentence}.", parameter=name, value=value)
