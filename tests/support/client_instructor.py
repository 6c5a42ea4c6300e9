"""What Instructor makes of structured output: prints the persons that it returns.

Run by `tests/e2e/test_other_clients.py` in an environment of its own, with the URL of a server.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import instructor
import openai
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Who it is."""

    name: Annotated[str, Field(max_length=8)]
    age: Annotated[int, Field(ge=0, le=130)]


found = []
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    answer = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "Who?"}],
        response_model=Person,
        max_tokens=250,
        max_retries=0,
    )
    found.append(answer.model_dump_json())
print(json.dumps(found))
