"""Random constraints for real engines, each with its own independent check."""

from __future__ import annotations

import functools
import json
import os
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import torch
from canvas_grammar.limits import ConstraintError
from canvas_grammar.pool import BusyError
from canvas_grammar_support.schemas.corpora import real_cases, suite_cases
from canvas_grammar_support.schemas.validators import Judge
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts

from tests.support.engine import Engine
from vllm_dllm.decoding import Corruption
from vllm_dllm.decoding.names import algorithms
from vllm_dllm.frontend import Prompt

MODELS: dict[str, tuple[str, Corruption]] = {
    "llada2": ("tiny-llada2", "mask"),
    "gemma": ("tiny-diffusiongemma", "uniform"),
}
# On both trained models together; a tenth of them on random ones. The long form:
# VLLM_DLLM_CASES=5000
CASES = int(os.environ.get("VLLM_DLLM_CASES", "140"))
AT_ONCE = 70
WORDS = ("ab", "copy", "delta", "é", "x y", "Straße", "42", '"q"')
PIECES = (
    r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    r"[a-z]{1,8}@[a-z]{2,6}\.(com|org)",
    r"(yes|no|perhaps)",
    r"[A-Z][a-z]{0,7}",
    r"-?[1-9][0-9]{0,3}(\.[0-9]{1,2})?",
    r"(ab|ba)+",
    r"[^x]{3}",
    r"[\w ]{2,10}",
)
GRAMMARS = (
    'root ::= "(" root ")" | "[" root root? "]" | [a-c]{1,3}',
    'root ::= sum\nsum ::= sum "+" term | term\nterm ::= [0-9]{1,2} | "(" sum ")"',
    'root ::= "a" root "b" | "c"',
)


@dataclass(frozen=True)
class Case:
    """What is asked for, what tells whether a text is it, and whether a refusal is expected."""

    structured: dict[str, Any]
    fits: Callable[[str], bool]
    may_be_refused: bool = False


def random_case(random: Random) -> Case:
    kind = random.choice(
        ["choice", "regex", "json", "json", "wide", "object", "grammar", "suite", "real"]
    )
    if kind == "choice":
        options = random.sample(WORDS, random.randint(1, 4))
        return Case({"choice": options}, options.__contains__)
    if kind == "regex":
        parts = random.choices(PIECES, k=random.randint(1, 3))
        pattern = random.choice(["", " ", ", "]).join(f"({part})" for part in parts)
        return Case({"regex": pattern}, lambda text: re.fullmatch(pattern, text) is not None)
    if kind == "object":
        return Case({"json_object": True}, lambda text: isinstance(json.loads(text), dict))
    if kind == "grammar":
        grammar = random.choice(GRAMMARS)
        judge = Grammar.from_ebnf(grammar)
        return Case({"grammar": grammar}, lambda text: accepts(judge, text))
    if kind in ("suite", "real"):
        return published_case(random, kind)
    schema = random_schema(random, 2) if kind == "json" else wide_schema(random)

    def fits(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True

    return Case({"json": schema}, fits)


@functools.cache
def short_schemas(corpus: str) -> list[tuple[Any, str]]:
    """Schemas of a corpus, with their drafts, that are quickly compiled.

    A validator may read what `contentEncoding` describes; here it is an annotation.
    """
    cases = real_cases() if corpus == "real" else suite_cases()
    return [
        (case.schema, case.draft)
        for case in cases
        if isinstance(case.schema, dict)
        and len(json.dumps(case.schema)) < 1500
        and "/optional/content/" not in case.name
    ]


def published_case(random: Random, corpus: str) -> Case:
    """A schema of the standard's own suite, or one that somebody wrote, if these are there."""
    schema, draft = random.choice(short_schemas(corpus) or short_schemas("suite"))
    judge = Judge.of(schema, draft)
    return Case(
        {"json": schema}, lambda text: judge.complaint(text.encode()) is None, may_be_refused=True
    )


def wide_schema(random: Random) -> dict[str, Any]:
    """One that calls itself, leaves values open, or combines others."""
    part = random_schema(random, 1)
    kind = random.choice(
        ["any", "tree", "list", "additional", "patterns", "overlapping", "allOf", "not"]
    )
    if kind == "any":
        return random.choice([{}, {"type": "array"}, {"type": ["object", "array"]}])
    if kind == "tree":
        children = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
        tree = {
            "type": "object",
            "properties": {"value": part, "children": children},
            "required": random.choice([["value"], ["value", "children"]]),
            "additionalProperties": False,
        }
        return {"$ref": "#/$defs/tree", "$defs": {"tree": tree}}
    if kind == "list":
        return {"anyOf": [part, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]}
    if kind == "additional":
        more = random.choice([True, part])
        return {"type": "object", "properties": {"a": part}, "additionalProperties": more}
    if kind == "patterns":
        return {
            "type": "object",
            "patternProperties": {"^x": part, "y$": {"type": ["integer", "string"]}},
            "additionalProperties": random.choice([True, False]),
        }
    if kind == "overlapping":
        return {"anyOf": [part, {"type": ["integer", "string", "object"]}, {"minimum": 3}]}
    if kind == "allOf":
        wide = {"type": "object", "properties": {"a": part}, "required": ["a"]}
        return {"allOf": [wide, {"properties": {"b": {"type": "null"}}}, {"maxProperties": 2}]}
    return {"type": ["string", "integer", "null"], "not": {"enum": ["", "one", 1, None]}}


def random_schema(random: Random, depth: int) -> dict[str, Any]:
    scalars = ("integer", "number", "boolean", "null", "string", "enum", "format")
    kind = random.choice([*scalars, *(["object", "object", "array", "anyOf"] if depth else [])])
    if kind == "integer":
        low = random.randint(-20, 900)
        return {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 300)}
    if kind == "string":
        return {"type": "string", "maxLength": random.randint(0, 8)}
    if kind == "enum":
        return {"enum": random.sample([1, "one", None, True, 2.5, "zwölf"], random.randint(1, 4))}
    if kind == "format":
        return {"type": "string", "format": random.choice(["date", "time", "uuid", "email"])}
    if kind == "array":
        least = random.randint(0, 2)
        items = random_schema(random, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + 1}
    if kind == "anyOf":
        return {"anyOf": [random_schema(random, depth - 1) for _ in range(2)]}
    if kind != "object":
        return {"type": kind}
    names = random.sample(string.ascii_lowercase, random.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(random, depth - 1) for name in names},
        "required": names[: random.randint(0, len(names))],
    }


def random_params(random: Random, case: Case, corruption: Corruption) -> SamplingParams:
    """Temperature, seed, filters and algorithm at random; `max_tokens` is for the caller."""
    able = [each for each in algorithms(corruption) if "constraints" not in each.excludes]
    algorithm = random.choice(able)
    warm = algorithm.samples and random.random() < 0.5
    return SamplingParams(
        temperature=random.choice([0.3, 1.0, 2.0]) if warm else 0,
        top_p=random.choice([1.0, 0.9]),
        top_k=random.choice([0, 20]),
        logprobs=random.choice([None, None, 0, 3]),
        seed=random.getrandbits(30),
        extra_args={
            "diffusion_algorithm": algorithm.name,
            "diffusion_stream_prefix": not algorithm.edits and random.random() < 0.2,
        },
        structured_outputs=StructuredOutputsParams(**case.structured),
    )


def with_random_weights(checkpoint: Path, out: Path, seed: int) -> Path:
    """A model of the same shape and tokenizer that has no idea of any task."""
    out.mkdir()
    for file in checkpoint.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * 0.1 if tensor.ndim > 1 else tensor
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def prompts(running: Engine, count: int, seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    texts = ("copy ab cd", "sort 3 1 2", "reverse abcd", '{"name": "Ada"}', "x" * 40)
    encode = running.llm.get_tokenizer().encode
    return [encode(random.choice(texts) * random.randint(1, 3)) for _ in range(count)]


def fuzz(running: Engine, family: str, cases: int, seed: int) -> None:
    """Random constraints, seeds, algorithms and budgets: valid and finished, each of them."""
    random = Random(seed)
    for first in range(0, cases, AT_ONCE):
        asked = [drawn(running, family, random) for _ in range(min(AT_ONCE, cases - first))]
        given = [
            {"prompt_token_ids": prompt}
            for prompt in prompts(running, len(asked), random.getrandbits(30))
        ]
        outputs = running.llm.generate(given, [one for _, one, _ in asked], use_tqdm=False)
        for (case, one, most), output in zip(asked, outputs, strict=True):
            found = output.outputs[0]
            what = (case.structured, found.text, one)
            assert found.finish_reason == "stop", what
            assert len(found.token_ids) <= most, what
            assert fits(case, found.text), what
    running.assert_idle()


def fits(case: Case, text: str) -> bool:
    """Whether a text is what was asked for, whichever way its judge says so."""
    try:
        return case.fits(text)
    except ValueError:  # no JSON
        return False
    except jsonschema.ValidationError:
        return False


def drawn(running: Engine, family: str, random: Random) -> tuple[Case, SamplingParams, int]:
    """A case, parameters, and the most tokens of the output, from the least possible on."""
    structured = running.llm.llm_engine.input_processor.dllm_front_end.structured
    longest = running.llm.llm_engine.vllm_config.model_config.max_model_len // 2
    for _ in range(40):
        case = random_case(random)
        params = random_params(random, case, MODELS[family][1])
        try:
            least = structured.submit(params, None, Prompt([])).result().minimum
        except ConstraintError as error:
            # Some are too large for a busy machine; what is refused is refused for that only.
            sized = "too large" in str(error) or "seconds" in str(error)
            assert case.may_be_refused or sized, case.structured
            continue
        except BusyError:  # says nothing about the constraint
            continue
        most = least + random.choice([0, 1, 7, 60])
        if most > longest:
            continue
        if random.random() < 0.2:
            params.max_tokens = None
            params.extra_args["diffusion_constraint_tokens"] = most
        else:
            params.max_tokens = most
        return case, params, most
    raise AssertionError("forty constraints in a row were refused")
