r"""A model that calls two functions of this file, in a loop, until it answers.

    vllm serve examples/tiny/checkpoints/tiny-llada2 --enforce-eager --max-model-len 1024 \
      --kv-cache-memory-bytes 256M --enable-auto-tool-choice --tool-call-parser hermes
    .venv/bin/python examples/tools.py --each-once

The tiny model was not trained on tools: `--each-once` demands a call of each function and then an
answer. The calls are valid, because a constraint makes them so; which city they name, and the
answer, mean nothing. Without the flag a model that knows tools chooses by itself. Its parser is in
docs/agents.md#flags.
"""

import argparse
import json
from typing import Any

from openai import OpenAI

FUNCTIONS = {
    "temperature": lambda city: {"Lima": 19, "Oslo": -3, "Rome": 14}[city],
    "time_of_day": lambda city: {"Lima": "06:10", "Oslo": "12:10", "Rome": "12:10"}[city],
}
CITY = {"type": "string", "enum": ["Lima", "Oslo", "Rome"]}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
SCHEMA["additionalProperties"] = False  # JSON Schema allows others
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in FUNCTIONS
]
QUESTION = "Is it colder in Oslo than in Rome, and what time is it there?"


def main(client: OpenAI, each_once: bool) -> None:
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    demanded: Any = [{"type": "function", "function": {"name": name}} for name in FUNCTIONS]
    for turn in range(8):
        choice = [*demanded, "none"][min(turn, 2)] if each_once else "auto"
        answer = (
            client.chat.completions.create(
                model=model, messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=200
            )
            .choices[0]
            .message
        )
        if not answer.tool_calls:
            print(f"answer: {answer.content}")
            return
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls:
            result = str(FUNCTIONS[call.function.name](**json.loads(call.function.arguments)))
            print(f"{call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--each-once", action="store_true", help="demand one call of each function")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    args = parser.parse_args()
    main(OpenAI(base_url=args.url, api_key="none"), args.each_once)
