"""A chat, a stream, a JSON schema, tools and request options with Instructor."""

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=130)


server = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
by_schema = instructor.from_openai(server, mode=instructor.Mode.JSON_SCHEMA)
by_tool = instructor.from_openai(server, mode=instructor.Mode.TOOLS)
ask = {
    "model": "MODEL",
    "messages": [{"role": "user", "content": "64 + 28"}],
    "temperature": 0,
    "max_tokens": 200,
}

answer = by_schema.create(**ask, response_model=None)
print("chat:", answer.choices[0].message.content)
*_, last = by_schema.create_partial(**ask, response_model=Person)
print("stream:", last.model_dump_json())
print("structured:", by_schema.create(**ask, response_model=Person).model_dump_json())
print("tools:", by_tool.create(**ask, response_model=Person).model_dump_json())
options = {"extra_body": {"vllm_xargs": {"diffusion_max_steps": 8}}}
answer = by_schema.create(**ask, **options, response_model=Person)
print("options:", answer.model_dump_json())
