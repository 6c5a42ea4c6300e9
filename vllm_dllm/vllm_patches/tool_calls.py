"""How strictly vLLM constrains the calls of tools where the server's options do not say it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm_dllm.vllm_patches.wrapping import wrap

_PARSERS = "vllm.tool_parsers.abstract_tool_parser"
# VLLM's name of the parser of Gemma's calls, and ours of their structural tag.
_GEMMA = "gemma4"


def follow_parameters() -> None:
    """Let the schema of every tool's parameters be followed, not only those of strict tools.

    By default vLLM constrains nothing where a call is optional and no tool is strict. The option
    ``--tool-strict-level`` still overrides this, and so does a tool parser with a default of its
    own. An offline process has not imported vLLM's tool parsers.
    """
    if _PARSERS not in sys.modules:
        return
    # Only here, because it imports vLLM, which importing this module must not.
    from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager
    from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

    ToolParser.default_tool_strict_level = ToolStrictLevel.PARAMETER
    wrap(ToolParserManager, "get_tool_parser", _with_a_tag_for_gemma)


def _with_a_tag_for_gemma(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give vLLM's parser of Gemma's calls a structural tag when a server asks for the parser.

    A parser with a tag constrains calls by it. To import this one takes a while, so it is not
    imported for servers with another.
    """
    from vllm_dllm.frontend.tool_calls import gemma_structural_tag

    def get_tool_parser(manager: Any, name: str) -> Any:
        parser = original(manager, name)
        if name == _GEMMA and parser.structural_tag_model is None:
            from vllm.tool_parsers.structural_tag_registry import register_vllm_structural_tag

            register_vllm_structural_tag(_GEMMA)(gemma_structural_tag)
            parser.structural_tag_model = _GEMMA
        return parser

    return get_tool_parser
