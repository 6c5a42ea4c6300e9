"""Independent implementations behind the golden answers of the self-test, and their prompts.

A reference goes from a request (or a problem) of a golden file and a rule of the sliding window to
the tokens, and to None where it does not have what the request asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from examples.tiny.tasks import problems
from examples.tiny.tokens import gemma_processor, llada2_tokenizer, sdar_tokenizer
from examples.tiny.training import Encoder
from tests.support.checkpoints import TINY
from vllm_dllm.selftest.cases import ATTENTION, FAMILIES

TokensOf = Callable[[dict[str, Any], str], list[int] | None]
# Kinds of requests that every reference has.
KINDS = frozenset({"greedy", "stream", "logprobs", "problem"})


def encoder(family: str) -> Encoder:
    """Problems to tokens, as the family's checkpoint was trained."""
    if family == "diffusion_gemma":
        return Encoder(gemma_processor().tokenizer)
    if family == "llada2":
        return Encoder(llada2_tokenizer())
    tokenizer = sdar_tokenizer()
    return Encoder(tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>"))


class Prompts:
    """Prompts of any length: the end of a long talk, which closes with a question."""

    def __init__(self, family: str) -> None:
        self.encode = encoder(family)

    def __call__(self, length: int, seed: int) -> list[int]:
        """The prompt of a length and a seed, as token ids."""
        names = ("reverse", "sort", "copy", "count")
        ids: list[int] = []
        for turn, problem in enumerate(problems("copy", 100 + seed, test=True)):
            if len(ids) >= length:
                break
            example = self.encode(problem)
            ids += example.prompt + (example.answer if turn % 2 else [])
        last = next(problems(names[seed % len(names)], seed, test=True))
        return [*ids, *self.encode(last).prompt][-length:]


def reference_of(family: str) -> TokensOf:
    """The reference of a family."""
    return {"llada2": _llada2, "sdar": _sdar, "diffusion_gemma": _gemma}[family]()


def _llada2() -> TokensOf:
    from tests.support.reference_llada2 import Reference, Rule

    tokenizer = llada2_tokenizer()
    length = ATTENTION["llada2"].canvas_length
    reference = Reference.load(TINY / FAMILIES["llada2"], length, tokenizer.mask_token_id)

    def answer(request: dict[str, Any], window: str) -> list[int] | None:
        params = request["params"]
        if request["kind"] not in KINDS | {"threshold"}:
            return None
        threshold = params["extra_args"]["diffusion_threshold"]
        ends = () if params.get("ignore_eos") else (tokenizer.eos_token_id,)
        rule = Rule(threshold=threshold)
        return reference.generate(request["prompt"], params["max_tokens"], rule, ends).tokens

    return answer


def _sdar() -> TokensOf:
    from tests.support.reference_sdar import Reference, Rule

    reference, encode = Reference(TINY / FAMILIES["sdar"]), encoder("sdar")
    ends = (encode.end, encode.tokenizer.eos_token_id)

    def answer(request: dict[str, Any], window: str) -> list[int] | None:
        params = request["params"]
        if request["kind"] not in KINDS | {"threshold", "algorithm"}:
            return None
        stop = () if params.get("ignore_eos") else ends
        rule = Rule.of_options(params["extra_args"])
        return reference.generate(request["prompt"], params["max_tokens"], rule, stop).tokens

    return answer


def _gemma() -> TokensOf:
    from tests.support.reference_gemma import COLD, Reference

    path = TINY / FAMILIES["diffusion_gemma"]
    references = {window: Reference(path, window) for window in ("symmetric", "reference")}
    end = gemma_processor().tokenizer.eos_token_id

    def answer(request: dict[str, Any], window: str) -> list[int] | None:
        params = request["params"]
        if request["kind"] not in KINDS | {"steps", "window"}:
            return None
        steps = params.get("extra_args", {}).get("diffusion_max_steps", 32)
        canvases = -(-params["max_tokens"] // 32)
        tokens = references[window].generate(
            request["prompt"], params["seed"], canvases, max_denoising_steps=steps, **COLD
        )[: params["max_tokens"]]
        ends = end in tokens and not params.get("ignore_eos")
        return tokens[: tokens.index(end) + 1] if ends else tokens

    return answer
