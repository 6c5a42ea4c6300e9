"""A chat, a stream, a JSON schema, tools and request options with LangChain."""

import json

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=130)


server = {"base_url": "http://localhost:8000/v1", "api_key": "none", "model": "MODEL"}
model = ChatOpenAI(**server, temperature=0, max_tokens=200)

print("chat:", model.invoke("64 + 28").content)
print("stream:", "".join(chunk.content for chunk in model.stream("64 + 28")))
print("structured:", model.with_structured_output(Person).invoke("Who?").model_dump_json())
answer = model.bind_tools([Person], tool_choice="required").invoke("Who?")
print("tools:", json.dumps(answer.tool_calls[0]["args"]))
quick = ChatOpenAI(**server, temperature=0, extra_body={"vllm_xargs": {"diffusion_max_steps": 8}})
print("options:", quick.invoke("64 + 28").content)
