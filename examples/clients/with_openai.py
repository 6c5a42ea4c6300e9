"""A chat, a stream, a JSON schema, tools and request options with OpenAI."""

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=130)


client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
chat = client.chat.completions
ask = {"model": "MODEL", "messages": [{"role": "user", "content": "64 + 28"}], "temperature": 0}

print("chat:", chat.create(**ask).choices[0].message.content)
chunks = chat.create(**ask, stream=True)
print("stream:", "".join(chunk.choices[0].delta.content or "" for chunk in chunks))
answer = chat.parse(**ask, response_format=Person, max_tokens=100)
print("structured:", answer.choices[0].message.parsed.model_dump_json())
answer = chat.parse(
    **ask, tools=[pydantic_function_tool(Person)], tool_choice="required", max_tokens=200
)
print("tools:", answer.choices[0].message.tool_calls[0].function.arguments)
answer = client.completions.create(model="MODEL", prompt="64 + 28", max_tokens=8)
print("completion:", answer.usage.completion_tokens, "tokens")
answer = client.responses.create(model="MODEL", input="64 + 28", temperature=0)
print("responses:", answer.output_text)
answer = client.responses.parse(
    model="MODEL", input="Who?", text_format=Person, max_output_tokens=100
)
print("responses, structured:", answer.output_parsed.model_dump_json())
answer = chat.create(**ask, extra_body={"vllm_xargs": {"diffusion_max_steps": 8}})
print("options:", answer.choices[0].message.content)
