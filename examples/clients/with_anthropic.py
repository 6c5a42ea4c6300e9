"""A chat, a stream, a JSON schema, tools and request options with Anthropic."""

import json

from anthropic import Anthropic
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=130)


client = Anthropic(base_url="http://localhost:8000", api_key="none")
ask = {"model": "MODEL", "max_tokens": 200, "messages": [{"role": "user", "content": "64 + 28"}]}
schema = Person.model_json_schema()

print("chat:", client.messages.create(**ask).content[0].text)
with client.messages.stream(**ask) as stream:
    print("stream:", "".join(stream.text_stream))
form = {"format": {"type": "json_schema", "schema": schema}}
print("structured:", client.messages.create(**ask, output_config=form).content[0].text)
tools = [{"name": "book", "description": "Book a seat.", "input_schema": schema}]
answer = client.messages.create(**ask, tools=tools, tool_choice={"type": "any"})
print("tools:", json.dumps(answer.content[0].input))
answer = client.messages.create(**ask, extra_body={"vllm_xargs": {"diffusion_max_steps": 8}})
print("options:", answer.content[0].text)
