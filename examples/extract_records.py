"""Typed records out of free text, through the OpenAI client: each answer is one, always.

    vllm serve MODEL                       # any diffusion model
    .venv/bin/python examples/extract_records.py "Ada, 36, lives in London."

The schema is that of a pydantic class; an answer satisfies it to the last character, and ends
within `max_tokens`, whatever the model says.
"""

from __future__ import annotations

import argparse
from typing import Annotated

from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """What is asked for."""

    name: Annotated[str, Field(max_length=40)]
    age: Annotated[int, Field(ge=0, le=130)]
    city: Annotated[str, Field(max_length=40)] | None


def extract(client: OpenAI, text: str, max_tokens: int = 120) -> Person:
    """The record in a text, as the served model reads it."""
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": f"Give the person in this text as JSON: {text}"}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": Person.model_json_schema()},
        },
        max_tokens=max_tokens,
    )
    return Person.model_validate_json(answer.choices[0].message.content or "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key="none")
    for text in args.text:
        print(extract(client, text))


if __name__ == "__main__":
    main()
