"""What LiteLLM makes of structured output: prints the arguments and texts that it returns.

Run by `tests/e2e/test_other_clients.py` in an environment of its own, with the URL of a server.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import litellm
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Who it is."""

    name: Annotated[str, Field(max_length=8)]
    age: Annotated[int, Field(ge=0, le=130)]


asked: dict[str, Any] = {"model": "openai/m", "api_base": sys.argv[1], "api_key": "none",
                         "messages": [{"role": "user", "content": "Who?"}],
                         "max_tokens": 250}  # fmt: skip
found = [litellm.completion(**asked, response_format=Person).choices[0].message.content]
function = {"name": "person", "parameters": Person.model_json_schema()}
tools = [{"type": "function", "function": function}]
answer = litellm.completion(**asked, tools=tools, tool_choice="required")
found += [call.function.arguments for call in answer.choices[0].message.tool_calls]
print(json.dumps(found))
