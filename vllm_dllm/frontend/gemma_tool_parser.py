"""VLLM's parser for Gemma's tool calls, with a structural tag that constrains the calls."""

from __future__ import annotations

from typing import Any

from canvas_grammar.grammar.marks import CALL, CALL_END
from vllm.tool_parsers import structural_tag_registry as formats
from vllm.tool_parsers.gemma4_engine_tool_parser import Gemma4EngineToolParser

from vllm_dllm.frontend.tool_calls import GEMMA_BEGIN

GEMMA = "gemma4"


def gemma_structural_tag(tools: list[Any], builtin: Any, tool_choice: str, *_: Any) -> Any:
    """The structural tag for Gemma's calls, for which vLLM has none.

    The tag has the JSON schema of a call's arguments in the place of the arguments in Gemma's
    notation, because xgrammar has no format for these. `tool_calls` inserts our format. Arguments
    are those of vLLM's registry; `builtin` tools are not supported in Gemma's calls.
    """
    tags = [
        formats.TagFormat(
            begin=GEMMA_BEGIN + tool.function.name,
            content=formats.JSONSchemaFormat(
                json_schema=formats.get_function_parameters(tool.function)
            ),
            end=CALL_END,
        )
        for tool in tools
    ]
    if tool_choice == "auto":
        calls = formats.TriggeredTagsFormat(triggers=[CALL], tags=tags)
    else:
        calls = formats.TagsWithSeparatorFormat(
            tags=tags, separator="", at_least_one=True, stop_after_first=tool_choice == "forced"
        )
    return formats.StructuralTag(format=calls)


formats.register_vllm_structural_tag(GEMMA)(gemma_structural_tag)


class GemmaToolParser(Gemma4EngineToolParser):
    """Adds the structural tag that vLLM's own parser lacks."""

    structural_tag_model = GEMMA
