"""How strictly vLLM constrains the calls of tools where the server's options do not say it."""

from __future__ import annotations

import sys

_PARSERS = "vllm.tool_parsers.abstract_tool_parser"


def follow_parameters() -> None:
    """Let the schema of every tool's parameters be followed, not only those of strict tools.

    By default vLLM constrains nothing where a call is optional and no tool is strict. The option
    ``--tool-strict-level`` still overrides this, and so does a tool parser with a default of its
    own. An offline process has not imported vLLM's tool parsers.
    """
    if _PARSERS not in sys.modules:
        return
    # Only here, because it imports vLLM, which importing this module must not.
    from vllm.tool_parsers.abstract_tool_parser import ToolParser
    from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

    ToolParser.default_tool_strict_level = ToolStrictLevel.PARAMETER
