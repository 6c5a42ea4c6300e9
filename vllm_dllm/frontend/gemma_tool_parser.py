"""VLLM's parser of Gemma's calls, with a structural tag by which calls are constrained.

Imported when a server asks for the parser ``gemma4``: vLLM's takes a while to import.
"""

from __future__ import annotations

from vllm.tool_parsers.gemma4_engine_tool_parser import Gemma4EngineToolParser
from vllm.tool_parsers.structural_tag_registry import register_vllm_structural_tag

from vllm_dllm.frontend.tool_calls import GEMMA, gemma_structural_tag

register_vllm_structural_tag(GEMMA)(gemma_structural_tag)


class GemmaToolParser(Gemma4EngineToolParser):
    """vLLM's own has no structural tag."""

    structural_tag_model = GEMMA
