"""Structured output through real engines: every output valid and finished, whatever is asked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from canvas_grammar.decoding.best_path import FreeTokens
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from examples.tiny.tasks import held_out_set
from tests.serving.engines.test_steady_step import Waits, counted_reads
from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY
from tests.support.constrained import CASES, MODELS, fuzz, prompts
from tests.support.drive import Driver
from tests.support.engine import Engine, engine, greedy
from vllm_dllm.engine.constraints import ConstrainedStep
from vllm_dllm.engine.contracts import StepPlan
from vllm_dllm.engine.slots import Phase
from vllm_dllm.ops.statistics.sampled import draw_and_sum

pytestmark = [pytest.mark.engine, pytest.mark.slow]

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


def test_without_a_maximum_an_output_ends_nonetheless(running: Engine) -> None:
    """Within as many tokens as the option says, or as the shortest output takes."""
    endless = StructuredOutputsParams(json={"type": "array", "items": {"enum": [0, 1]}})
    for bound, most in ((12, 12), (1, 3)):
        params = SamplingParams(
            max_tokens=None, temperature=1.5, seed=3, structured_outputs=endless,
            extra_args={"diffusion_constraint_tokens": bound},
        )  # fmt: skip
        (output,) = running.llm.generate(prompts(running, 1), [params], use_tqdm=False)
        found = output.outputs[0]
        assert found.finish_reason == "stop"
        assert isinstance(json.loads(found.text), list)
        assert len(found.token_ids) <= most
    assert params.max_tokens is None and params.structured_outputs is endless


def test_others_in_the_batch_do_not_notice(running: Engine) -> None:
    """Token for token, greedy and seeded; and equal constraints share an automaton."""
    others = prompts(running, 8, 5)
    params = [
        SamplingParams(temperature=n % 2, max_tokens=70, seed=n, ignore_eos=True)
        for n in range(len(others))
    ]
    alone = running.generate(others, params)
    mixed_prompts, mixed = [], []
    for n, (prompt, one) in enumerate(zip(others, params, strict=True)):
        mixed_prompts += [prompt, prompt]
        mixed += [one, structured(80, {"json": RECORD}, n=1)]
        if n % 2:
            mixed[-1].temperature = 0.8
    together = running.generate(mixed_prompts, mixed)
    assert together[::2] == alone
    assert all(reason == "stop" for _, reason in together[1::2])
    followed = running.runner.model_state.parts.constraints.sessions.values()
    assert len({id(constraint) for constraint in followed}) <= 1


def test_a_constraint_that_changes_nothing_changes_nothing(running: Engine) -> None:
    """Token for token. DiffusionGemma writes padding behind its answers."""
    chats = [[{"role": "user", "content": problem.prompt}] for problem in held_out_set(4)]
    every = StructuredOutputsParams(regex=r"[0-9a-z -]*")
    found = []
    for constraint in (None, every):
        params = greedy(64, structured_outputs=constraint)
        outputs = running.llm.chat(chats, params, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]
    assert len({len(tokens) for tokens in found[0]}) > 3


def test_a_seed_gives_the_same_output_in_any_company(running: Engine) -> None:
    asked = prompts(running, 6, 7)
    params = [structured(60, {"json": RECORD}, seed=n) for n in range(len(asked))]
    for one in params:
        one.temperature = 1.0
    together = running.generate(asked, params)
    alone = [running.generate([p], [one])[0] for p, one in zip(asked, params, strict=True)]
    assert together == alone
    assert len({tuple(tokens) for tokens, _ in together}) > 1


def test_a_preempted_request_finds_its_state_again(running: Engine) -> None:
    """It is preempted between two canvases; its output is part of its prompt afterwards."""
    pattern = {"regex": "([a-z]{3}-){20}end"}
    (prompt,) = prompts(running, 1)
    params = structured(110, pattern, seed=4)
    (expected,) = running.generate([prompt], [params])
    driver = Driver(running)
    driver.add("asked", prompt, params)
    driver.until(lambda: len(driver.request("asked").output_token_ids) >= 32)
    # vLLM's own way to take everything back, as after an update of the weights.
    assert running.core.reset_prefix_cache(reset_running_requests=True)
    assert driver.finish()["asked"] == expected[0]
    running.assert_idle()


def test_a_step_reads_nothing_back(running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails for an `.item()`, a boolean index or a `nonzero` between forward and output.

    On a CPU a step reads which rows are masked; here it takes all, like a GPU.
    """

    def drawn(_: Any, rows: Any, likeliest: Any, __: Any) -> FreeTokens:
        token, total = draw_and_sum(rows.filtered, rows.keys.flatten())
        top = rows.filtered.gather(1, likeliest.view(-1, 1))[:, 0]
        shape = likeliest.shape
        return FreeTokens(likeliest, token.view(shape), (top - total).exp().view(shape), rows.keys)

    monkeypatch.setattr(ConstrainedStep, "_drawn_freely", drawn)
    monkeypatch.setattr(StepPlan, "masked_rows", lambda *_: None)
    slow = {"diffusion_max_steps": 20, "diffusion_stability_threshold": 1000}
    pace = slow if running.slots.kind.mask_token is None else {"diffusion_threshold": 2.0}
    driver, found = Driver(running), Counter[str]()
    for n, prompt in enumerate(prompts(running, 3)):
        params = structured(100, {"json": RECORD}, seed=n, **pace)
        params.temperature = n % 2
        driver.add(f"step-{n}", prompt, params)

    def denoising() -> bool:
        canvases = [driver.canvas(f"step-{n}") for n in range(3)]
        return all(c is not None and c[0] is Phase.DENOISE and c[2] > 0 for c in canvases)

    driver.until(denoising)
    with counted_reads(found), Waits() as waits:
        driver.step()
    assert not found + waits.found
    driver.finish()


@pytest.mark.parametrize(
    ("constraint", "options", "complaint"),
    [
        ({"json": RECORD}, {"max_tokens": 5}, "at least"),
        ({"grammar": "root ::= 'a'"}, {}, "not GBNF"),
        ({"grammar": "start: /(?=a)b/"}, {}, "lookahead"),
        ({"regex": "(a"}, {}, "not a regular expression"),
        ({"regex": r"(a)\1"}, {}, "groups"),
        ({"choice": ["a"]}, {"stop_token_ids": [5]}, "stop_token_ids"),
        ({"choice": ["a"]}, {"ignore_eos": True}, "ignore_eos"),
        ({"choice": ["a"]}, {"min_tokens": 3}, "min_tokens"),
        (
            {
                "json": {
                    "uniqueItems": True,
                    "minItems": 7,
                    "type": "array",
                    "items": {"type": "string"},
                }
            },
            {},
            "unique",
        ),
    ],
)
def test_refused_by_name(
    running: Engine, constraint: dict[str, Any], options: dict[str, Any], complaint: str
) -> None:
    params = structured(**({"max_tokens": 40, "constraint": constraint} | options))
    with pytest.raises(VLLMValidationError, match=complaint):
        running.generate(prompts(running, 1), [params])
    running.assert_idle()
