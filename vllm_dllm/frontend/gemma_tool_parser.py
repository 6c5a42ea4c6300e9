"""VLLM's parser for Gemma's tool calls, with a structural tag that constrains the calls.

This module is imported only when a server asks for the parser ``gemma4``, because vLLM's parser
takes a while to import.
"""

from __future__ import annotations

from vllm.tool_parsers.gemma4_engine_tool_parser import Gemma4EngineToolParser
from vllm.tool_parsers.structural_tag_registry import register_vllm_structural_tag

from vllm_dllm.frontend.tool_calls import GEMMA, gemma_structural_tag

register_vllm_structural_tag(GEMMA)(gemma_structural_tag)


class GemmaToolParser(Gemma4EngineToolParser):
    """Adds the structural tag that vLLM's own parser lacks."""

    structural_tag_model = GEMMA
