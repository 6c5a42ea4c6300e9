"""Make the golden answers of ``vllm-dllm selftest``.

    .venv/bin/python scripts/selftest_golden.py [FAMILY ...]

Requests are proposed, answered by this package's engine on the CPU in float32, bfloat16 and
float16, and kept if all three answers are the same: another machine's order of summation then does
not change them either. Every answer of an algorithm that an independent implementation has must
equal that one's; the file says of each request where its answer comes from:

- ``reference``: LLaDA2's from a float32 loop that recomputes everything
  (`tests/support/reference_llada2.py`, itself checked against golden vectors of the authors' code),
  SDAR's from such a loop around transformers' Qwen3 (`tests/support/reference_sdar.py`),
  DiffusionGemma's from transformers' own class;
- ``engine``: from the CPU engine alone, because no other implementation has the option (seeded
  samples, structured output, LLaDA2's other algorithms, logprobs).

The 200 problems are held-out ones of `examples/tiny/tasks.py`; who is right is the reference's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from examples.tiny.tasks import held_out_set  # noqa: E402
from scripts.selftest_references import Prompts, encoder, reference_of  # noqa: E402
from tests.support.checkpoints import TINY  # noqa: E402
from tests.support.reference_sdar import Rule  # noqa: E402
from vllm_dllm.selftest.cases import FAMILIES, Case  # noqa: E402
from vllm_dllm.selftest.command import run_job  # noqa: E402

GOLDEN = ROOT / "vllm_dllm" / "selftest" / "golden"
LENGTHS = (1, 2, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 300, 500, 700)
PROBLEMS = 200
HALF = ("bfloat16", "float16")
ANSWER = 40  # max_tokens: more than one block, and no whole number of them
LEAST = 8  # tokens of an answer that is kept, but for structured output
LIMIT = 900.0
STRUCTURED: tuple[dict[str, Any], ...] = (
    {"choice": ["12", "97", "yes", "diffusion"]},
    {"regex": "[0-9]{2}( [0-9]{2}){2,5}"},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
)
MASKED = ("llada2", "sdar")  # families whose canvases begin as masks
# Settings of the masked algorithms beside the default one.
ALGORITHMS = {
    "llada2": [
        {"diffusion_algorithm": name}
        | ({} if name in ("FixedSteps", "EntropyBound") else {"diffusion_threshold": 0.8})
        for name in ("JointThreshold", "FixedSteps", "Hierarchical", "Credit", "EntropyBound")
    ],
    "sdar": [
        Rule(threshold=0.99, steps=2).options(),
        Rule("LowConfidenceStatic", steps=3).options(),
        Rule("Sequential", steps=2).options(),
        Rule("EntropyBounded").options(),
    ],
}
KEEP = {"greedy": 17, "threshold": 6, "steps": 6, "algorithm": 8, "seeded": 6}
KEEP |= {"filtered": 4, "structured": 6, "logprobs": 3, "stream": 4, "window": 4}


def proposals(family: str) -> Iterator[dict[str, Any]]:
    """Requests, each with its kind and whether an independent implementation has its answer."""
    prompts = Prompts(family)
    masked = family in MASKED

    def request(kind: str, length: int, seed: int, extra: Any = None, **params: Any) -> Any:
        given = {"max_tokens": ANSWER, "seed": seed, "temperature": 0.0} | params
        options = ({"diffusion_threshold": 0.9} if masked else {}) | (extra or {})
        return {
            "kind": kind,
            "prompt": prompts(length, seed),
            "params": given | ({"extra_args": options} if options else {}),
            "stream": kind == "stream",
        }

    for length in LENGTHS:
        for seed in range(8):
            # Behind a long talk the models often end at once; half of the requests may not.
            yield request("greedy", length, seed, ignore_eos=seed % 2 == 1)
    for seed in range(4, 8):
        if masked:
            for threshold in (0.5, 0.7, 1.01):
                yield request("threshold", 40, seed, {"diffusion_threshold": threshold})
            for extra in ALGORITHMS[family]:
                yield algorithm(request("algorithm", 50, seed), extra)
        else:
            for steps in (1, 4):
                yield request("steps", 40, seed, {"diffusion_max_steps": steps})
    if not masked:
        # Kept where the two rules of the sliding window give different tokens.
        for seed in range(20, 44):
            steps = {"diffusion_max_steps": 1 + seed % 2}
            yield request("window", 140 + 30 * (seed % 6), seed, steps, ignore_eos=True)
    prefix = {"diffusion_stream_prefix": True, "diffusion_threshold": 1.01} if masked else {}
    for seed in range(8, 20):
        yield request("stream", 45, seed, prefix)
        yield request("logprobs", 33, seed, logprobs=3)
        yield request("seeded", 36, seed, temperature=0.7)
        yield request("seeded", 61, seed, temperature=1.0, ignore_eos=seed % 2 == 1)
        yield request("filtered", 47, seed, temperature=0.8, top_k=5)
        yield request("filtered", 30, seed, temperature=0.8, top_p=0.8)
        constraint = STRUCTURED[seed % len(STRUCTURED)]
        yield request("structured", 39, seed, structured_outputs=constraint)


def algorithm(request: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """A request with no other options than these."""
    request["params"]["extra_args"] = extra
    return request


def engine(family: str, requests: list[dict[str, Any]], dtype: str, window: str) -> dict[str, Any]:
    """What the engine on this CPU answers; answers by request id."""
    case = Case(family, "CPU_ATTN", "EAGER", "torch", dtype, "sync", window=window)
    job = {
        "case": asdict(case),
        "model": str(TINY / FAMILIES[family]),
        "requests": [request | {"alone": False} for request in requests],
        "problems": {"params": {}, "prompts": []},
    }
    answers: dict[str, Any] = run_job(job, LIMIT)["together"]
    return answers


def make(family: str) -> dict[str, Any]:
    """The golden file of a family."""
    windows = ("symmetric", "reference") if family == "diffusion_gemma" else ("symmetric",)
    proposed = [request | {"id": f"{n}"} for n, request in enumerate(proposals(family))]
    found = {
        (dtype, window): engine(family, proposed, dtype, window)
        for dtype in ("float32", *HALF)
        for window in windows
    }
    reference = reference_of(family)
    return {
        "made": " ".join(__doc__.split("\n\n", 2)[2].split()),
        "command": f"scripts/selftest_golden.py {family}",
        "sha256": hashlib.sha256(
            (TINY / FAMILIES[family] / "model.safetensors").read_bytes()
        ).hexdigest(),
        "requests": keep(family, proposed, found, reference),
        "problems": accuracy(family, reference, windows),
    }


def keep(
    family: str, proposed: list[dict[str, Any]], found: dict[Any, Any], reference: Any
) -> list[dict[str, Any]]:
    """The requests that stay, with their answers.

    Raises:
        RuntimeError: the engine differs from the reference.
    """
    windows = [window for dtype, window in found if dtype == "float32"]
    kept: list[dict[str, Any]] = []
    count, survived = Counter[str](), Counter[str]()
    for request in proposed:
        name, kind, length = request.pop("id"), request["kind"], len(request["prompt"])
        answers = {window: found["float32", window][name] for window in windows}
        tokens = {window: answer["tokens"] for window, answer in answers.items()}
        same = [
            dtype
            for dtype in HALF
            if all(found[dtype, window][name]["tokens"] == tokens[window] for window in windows)
        ]
        survived.update(same)
        if kind == "stream" and family in MASKED:
            fits = answers["symmetric"]["parts"] > 2
        else:
            fits = min(map(len, tokens.values())) >= LEAST or kind == "structured"
        if kind == "window":
            fits = fits and tokens["symmetric"] != tokens["reference"]
        if kind == "greedy":
            fits = fits and all(len(one["prompt"]) != length for one in kept)
        if len(same) < len(HALF) or count[kind] == KEEP[kind] or not fits:
            continue
        independently = {window: reference(request, window) for window in windows}
        known = any(answer is not None for answer in independently.values())
        if known and independently != tokens:
            raise RuntimeError(f"the engine differs from the reference: {request}")
        count[kind] += 1
        kept.append(
            request
            | {
                "id": f"{kind}-{count[kind]}-of-{length}-tokens",
                "source": "reference" if known else "engine",
                "alone": count[kind] == 1,
                "tokens": tokens,
            }
            | ({"logprobs": answers["symmetric"]["logprobs"]} if kind == "logprobs" else {})
        )
    print(f"{family}: {len(proposed)} proposed, {dict(survived)} as in float32, kept {dict(count)}")
    return kept


def accuracy(family: str, reference: Any, windows: tuple[str, ...]) -> dict[str, Any]:
    """200 problems with their answers, and which of them the reference gets right."""
    encode = encoder(family)
    examples = [encode(problem) for problem in held_out_set(29)][:PROBLEMS]
    params: dict[str, Any] = {"max_tokens": 64, "temperature": 0.0, "seed": 0}
    if family in MASKED:
        params["extra_args"] = {"diffusion_threshold": 0.9}
    right = [
        reference({"kind": "problem", "prompt": e.prompt, "params": params}, windows[0]) == e.answer
        for e in examples
    ]
    print(family, "reference:", sum(right), "of", len(right))
    return {
        "params": params,
        "prompts": [example.prompt for example in examples],
        "answers": [example.answer for example in examples],
        "right": "".join(str(int(one)) for one in right),
    }


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    for family in parser.parse_args().families:
        text = json.dumps(make(family), separators=(",", ":"))
        # A line for each request: differences between two versions can be read.
        text = text.replace('{"kind"', '\n{"kind"').replace('"problems"', '\n"problems"')
        (GOLDEN / f"{FAMILIES[family]}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
