"""A chat, a stream, a JSON schema, tools and request options with Pydantic AI."""

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=130)


provider = OpenAIProvider(base_url="http://localhost:8000/v1", api_key="none")
model = OpenAIChatModel("MODEL", provider=provider)
settings = {"temperature": 0, "max_tokens": 200}

print("chat:", Agent(model, model_settings=settings).run_sync("64 + 28").output)
stream = Agent(model, model_settings=settings).run_stream_sync("64 + 28")
print("stream:", "".join(stream.stream_text(delta=True)))
agent = Agent(model, output_type=NativeOutput(Person), model_settings=settings)
print("structured:", agent.run_sync("Who?").output.model_dump_json())
agent = Agent(model, output_type=ToolOutput(Person), model_settings=settings)
print("tools:", agent.run_sync("Who?").output.model_dump_json())
settings["extra_body"] = {"vllm_xargs": {"diffusion_max_steps": 8}}
print("options:", Agent(model, model_settings=settings).run_sync("64 + 28").output)
