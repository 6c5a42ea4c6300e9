"""Structured output through real engines: every output valid and finished, whatever is asked."""

from __future__ import annotations

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from random import Random
from threading import Timer
from typing import Any

import jsonschema
import pytest
import torch
from canvas_grammar.automaton.explorer import Explorer, Question
from canvas_grammar.decoding.best_path import FreeTokens
from canvas_grammar.limits import ConstraintError
from canvas_grammar.pool import BusyError
from canvas_grammar_support.schemas.corpora import real_cases, suite_cases
from canvas_grammar_support.schemas.validators import Judge
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts

from tests.serving.engines.test_steady_step import Waits, counted_reads, denoise
from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY
from tests.support.drive import Driver
from tests.support.engine import Engine, count_calls, engine, greedy
from vllm_dllm.decoding import Corruption
from vllm_dllm.decoding.registry import algorithms
from vllm_dllm.engine.constraints import CanvasStarts, ConstrainedStep
from vllm_dllm.engine.contracts import StepPlan
from vllm_dllm.frontend import Prompt
from vllm_dllm.ops.statistics.sampled import draw_and_sum

pytestmark = [pytest.mark.engine, pytest.mark.slow]

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
    kind = random.choice(["choice", "regex", "object", "grammar", "suite", "suite", "real", "real"])
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
    return published_case(random, kind)


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
    judge = Judge(schema, draft)
    return Case(
        {"json": schema}, lambda text: judge.complaint(text.encode()) is None, may_be_refused=True
    )


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
            assert case.fits(found.text), what
    running.assert_idle()


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
            sized = re.search("too large|seconds|MiB", str(error))
            assert case.may_be_refused or sized, case.structured
            continue
        except BusyError:  # says nothing about the constraint
            continue
        most = least + random.choice([0, 1, 7, 60])
        if most <= longest:
            if random.random() < 0.2:
                params.max_tokens = None
                params.extra_args["diffusion_constraint_tokens"] = most
            else:
                params.max_tokens = most
            return case, params, most
    raise AssertionError("forty constraints in a row were refused")


RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}


@pytest.fixture(scope="module", params=["llada2", pytest.param("gemma", marks=pytest.mark.long)])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def running(family: str) -> Iterator[Engine]:
    with engine(TINY / MODELS[family][0], 32, max_num_seqs=32, **TEXT_ONLY_OPTIONS) as started:
        yield started


def structured(max_tokens: int, constraint: dict[str, Any], **options: Any) -> SamplingParams:
    return greedy(max_tokens, structured_outputs=StructuredOutputsParams(**constraint), **options)


def test_every_output_is_valid_and_finished(running: Engine, family: str) -> None:
    fuzz(running, family, CASES // 2, 1)


@pytest.mark.parametrize("name", ["gemma", pytest.param("llada2", marks=pytest.mark.long)])
def test_outputs_of_random_weights(name: str, tmp_path: Path) -> None:
    """They know no task."""
    path = with_random_weights(TINY / MODELS[name][0], tmp_path / name, 3)
    with engine(path, 32, max_num_seqs=32, **TEXT_ONLY_OPTIONS) as started:
        fuzz(started, name, CASES // 10, 2)


@pytest.mark.parametrize(
    ("name", "pages"), [("llada2", 24), pytest.param("gemma", 44, marks=pytest.mark.long)]
)
def test_outputs_of_requests_that_are_preempted(name: str, pages: int) -> None:
    """Few pages: requests give theirs up, between canvases and within one, and take up again."""
    few = {"num_gpu_blocks_override": pages, "block_size": 32, "max_model_len": 320}
    options = few | TEXT_ONLY_OPTIONS
    with engine(TINY / MODELS[name][0], 32, max_num_seqs=32, **options) as started:
        preempted = count_calls(started.scheduler, "_preempt_request")
        fuzz(started, name, CASES // 10, 3)
        assert preempted


def test_others_in_the_batch_do_not_notice(running: Engine) -> None:
    """Token for token, with a constraint and without; and equal constraints share an automaton."""
    asked = [prompt for prompt in prompts(running, 8, 5) for _ in range(2)]
    params: list[SamplingParams] = []
    for n in range(8):
        free = SamplingParams(temperature=n % 2, max_tokens=70, seed=n, ignore_eos=True)
        params += [free, structured(80, {"json": RECORD}, seed=n)]
        params[-1].temperature = n % 2
    together = running.generate(asked, params)
    followed = running.runner.model_state.parts.constraints.sessions.values()
    assert len({id(constraint) for constraint in followed}) <= 1
    assert together == [running.generate([p], [q])[0] for p, q in zip(asked, params, strict=True)]
    assert all(reason == "stop" for _, reason in together[1::2])
    assert len({tuple(tokens) for tokens, _ in together[1::2]}) > 1


def test_a_step_reads_nothing_back(running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails for an `.item()`, a boolean index or a `nonzero` between forward and output.

    On a CPU a step reads which rows are masked, and whether canvases go on; here it takes all rows,
    and one pass, like a GPU.
    """

    def drawn(_: Any, rows: Any, likeliest: Any, __: Any) -> FreeTokens:
        token, total = draw_and_sum(rows.filtered, rows.keys.flatten())
        top = rows.filtered.gather(1, likeliest.view(-1, 1))[:, 0]
        shape = likeliest.shape
        return FreeTokens(likeliest, token.view(shape), (top - total).exp().view(shape), rows.keys)

    monkeypatch.setattr(ConstrainedStep, "_drawn_freely", drawn)
    monkeypatch.setattr(StepPlan, "masked_rows", lambda *_: None)
    monkeypatch.setattr(running.runner.sampler, "further", None)
    slow = {"diffusion_max_steps": 20, "diffusion_stability_threshold": 1000}
    pace = slow if running.slots.kind.mask_token is None else {"diffusion_threshold": 2.0}
    driver, found = Driver(running), Counter[str]()
    for n, prompt in enumerate(prompts(running, 3)):
        params = structured(100, {"json": RECORD}, seed=n, **pace)
        params.temperature = n % 2
        driver.add(f"step-{n}", prompt, params)
    denoise(driver, [f"step-{n}" for n in range(3)])
    with counted_reads(found), Waits() as waits:
        driver.step()
    assert not found + waits.found
    driver.finish()


def test_refused_by_name(running: Engine) -> None:
    choice = {"choice": ["a"]}
    for constraint, options, complaint in (
        ({"json": RECORD}, {"max_tokens": 5}, "at least"),
        ({"grammar": "start: /(?=a)b/"}, {}, "lookahead"),
        (choice, {"stop_token_ids": [5]}, "stop_token_ids"),
        (choice, {"ignore_eos": True}, "ignore_eos"),
        (choice, {"min_tokens": 3}, "min_tokens"),
    ):
        params = structured(**({"max_tokens": 40, "constraint": constraint} | options))
        with pytest.raises(VLLMValidationError, match=complaint):
            running.generate(prompts(running, 1), [params])
    running.assert_idle()


# Objects in lists in objects, and any other property: endlessly many states.
TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "inside": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name", "inside"],
}


class Late(CanvasStarts):
    """Answers one step late, and counts the steps in which canvases waited."""

    steps = 0

    def waits(self, slots: torch.Tensor, on_host: object) -> torch.Tensor | None:
        found = super().waits(slots, on_host)  # type: ignore[arg-type]
        if found is not None:
            self.steps += int(found.sum())
        return found


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.long), True])
def test_canvases_that_wait_for_the_host(running: Engine, stream: bool) -> None:
    """Nothing but their number of steps changes.

    On a CPU the host answers before the next step. Here it answers one step late, as on a GPU.
    """
    masked = running.slots.kind.mask_token is not None
    extra = {"diffusion_stream_prefix": True} if stream and masked else {}
    params = [
        SamplingParams(
            temperature=n % 2,
            seed=n,
            max_tokens=150,
            structured_outputs=StructuredOutputsParams(json=TREE),
            extra_args=extra,
        )
        for n in range(5)
    ]
    asked = prompts(running, len(params), 3)
    expected = running.generate(asked, params)
    constraints = running.runner.model_state.parts.constraints
    usual, late = constraints.starts, Late(len(running.slots.tail), torch.device("cpu"), late=1)
    constraints.starts = late
    try:
        assert running.generate(asked, params) == expected
        assert late.steps > len(params), "canvases have waited"
    finally:
        constraints.starts = usual
    decode = running.llm.get_tokenizer().decode
    for tokens, reason in expected:
        assert reason == "stop"
        jsonschema.validate(json.loads(decode(tokens, skip_special_tokens=True)), TREE)
    running.assert_idle()


def test_parts_that_take_long(running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go on, a request may end meanwhile, and tokens are those of parts found at once."""
    ask, late = Explorer.ask, list[Future[Any]]()

    def slowly(self: Explorer, question: Question) -> Future[Any]:
        passed_on, random = Future[Any](), Random(len(late))
        late.append(passed_on)

        def pass_on(answer: Future[Any]) -> None:
            Timer(random.random() / 5, passed_on.set_result, [answer.result()]).start()

        ask(self, question).add_done_callback(pass_on)
        return passed_on

    withheld: list[tuple[Future[Any], Future[Any]]] = []

    def withhold(self: Explorer, question: Question) -> Future[Any]:
        withheld.append((Future[Any](), ask(self, question)))
        return withheld[-1][0]

    constraints = running.runner.model_state.parts.constraints

    @torch.inference_mode()
    def forget() -> None:
        for slot in list(constraints.sessions):
            constraints.leave(slot)
        constraints._unused.clear()

    options = {"structured_outputs": StructuredOutputsParams(json=TREE)}
    params = [SamplingParams(temperature=n % 2, seed=n, max_tokens=90, **options) for n in range(4)]
    params.append(SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))
    asked = prompts(running, len(params), 4)
    monkeypatch.setattr(constraints, "_explorer", None)
    forget()
    expected = running.generate(asked, params)
    monkeypatch.undo()
    forget()
    monkeypatch.setattr(Explorer, "ask", slowly)
    assert running.generate(asked, params) == expected
    assert len(late) > len(params)
    forget()
    monkeypatch.setattr(Explorer, "ask", withhold)
    driver = Driver(running)
    for n, name in enumerate(["ends", "waits"]):
        driver.add(name, asked[n], params[n])
    driver.add("free", asked[-1], params[-1])
    # The slots are those of requests with constraints before; this one has left its first block.
    driver.until(lambda: (driver.canvas("free") or (None, 0))[1] > 32)
    assert len(constraints._finding) == 2
    running.llm.llm_engine.abort_request(["ends"])
    driver.step()
    assert len(constraints._finding) == 1
    monkeypatch.undo()
    for passed_on, answer in withheld:
        passed_on.set_result(answer.result(timeout=60))
    tokens = driver.finish()
    assert [tokens["waits"], tokens["free"]] == [expected[1][0], expected[-1][0]]
    running.assert_idle()
    wait(late)
