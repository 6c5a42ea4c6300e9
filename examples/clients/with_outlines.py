"""A chat, a stream, every kind of constraint and request options with Outlines."""

from typing import Literal

import outlines
from openai import OpenAI
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=130)


client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
model = outlines.from_vllm(client, "MODEL")

print("chat:", model("64 + 28", temperature=0))
print("stream:", "".join(model.stream("64 + 28", temperature=0)))
print("structured:", model("Who?", Person, max_tokens=100))
print("choice:", model("Yes or no?", Literal["yes", "no"]))
print("regex:", model("When?", Regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")))
print("grammar:", model("Sum?", CFG('start: /[0-9]/ ("+" /[0-9]/)*'), max_tokens=20))
options = {"vllm_xargs": {"diffusion_max_steps": 8}}
print("options:", model("64 + 28", temperature=0, extra_body=options))
