"""A chat, a stream, a JSON schema, tools and request options with LiteLLM."""

from litellm import completion
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=130)


ask = {
    "model": "hosted_vllm/MODEL",
    "api_base": "http://localhost:8000/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "64 + 28"}],
    "temperature": 0,
    "max_tokens": 200,
}

print("chat:", completion(**ask).choices[0].message.content)
chunks = completion(**ask, stream=True)
print("stream:", "".join(chunk.choices[0].delta.content or "" for chunk in chunks))
answer = completion(**ask, response_format=Person)
print("structured:", answer.choices[0].message.content)
function = {"name": "book", "parameters": Person.model_json_schema()}
tools = [{"type": "function", "function": function}]
answer = completion(**ask, tools=tools, tool_choice="required")
print("tools:", answer.choices[0].message.tool_calls[0].function.arguments)
answer = completion(**ask, extra_body={"vllm_xargs": {"diffusion_max_steps": 8}})
print("options:", answer.choices[0].message.content)
