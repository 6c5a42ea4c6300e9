"""A choice, an expression, a JSON schema and a grammar, in one offline batch.

    .venv/bin/python examples/structured_output.py

Each answer satisfies its constraint, whatever the model says. The tiny model, which is the default,
knows the answers to the first two questions only; `--model inclusionAI/LLaDA2.0-mini` asks a real
one. Against a server, through the OpenAI client: examples/extract_records.py.
"""

import argparse
from pathlib import Path

from pydantic import BaseModel, Field
from vllm import LLM
from vllm.sampling_params import StructuredOutputsParams

TINY = Path(__file__).resolve().parent / "tiny" / "checkpoints" / "tiny-llada2"
# For a laptop; leave them out on a GPU.
SMALL = {"enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28}


class City(BaseModel):
    """What is asked for."""

    name: str = Field(max_length=12)
    population: int = Field(ge=0, le=40_000_000)


QUESTIONS = {
    "64 + 28": StructuredOutputsParams(choice=["82", "92", "102"]),
    "sort 61 35 88 14": StructuredOutputsParams(regex="[0-9]{2}( [0-9]{2}){3}"),
    "Describe a city as JSON.": StructuredOutputsParams(json=City.model_json_schema()),
    "Write a sum of numbers.": StructuredOutputsParams(
        grammar='start: number ("+" number)+\nnumber: /[1-9][0-9]?/'
    ),
}


def main(llm: LLM) -> None:
    params = []
    for constraint in QUESTIONS.values():
        params.append(llm.get_default_sampling_params())
        params[-1].max_tokens = 80  # a constraint that needs more is refused, with the number
        params[-1].structured_outputs = constraint
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for question, output in zip(QUESTIONS, llm.chat(messages, params), strict=True):
        print(f"{question:26}{output.outputs[0].text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="any diffusion model; default: tiny-llada2")
    model = parser.parse_args().model
    main(LLM(model) if model else LLM(str(TINY), **SMALL))
