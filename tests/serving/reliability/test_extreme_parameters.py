"""Parameters at the ends of their types, and parameters that contradict each other.

Whatever a request carries, it is refused by name, or served, or ended alone.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.support.engine import Engine, engine
from tests.support.reference_gemma import random_checkpoint
from vllm_dllm.engine import row_options
from vllm_dllm.frontend import front_end

pytestmark = pytest.mark.engine

PROMPT = [[20 + i] * (9 + 5 * i) for i in range(4)]
FLOAT32 = float.fromhex("0x1.fffffep+127")


def params(**options: Any) -> Any:
    extra = {name: options.pop(name) for name in list(options) if name.startswith("diffusion_")}
    return SamplingParams(**({"max_tokens": 12} | options), extra_args=extra or None)


def vocabulary(running: Engine) -> int:
    return running.llm.model_config.get_vocab_size()


def known(running: Engine) -> list[Any]:
    return running.generate(
        PROMPT, [params(temperature=0, seed=n, max_tokens=20) for n in range(4)]
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "seed above": ({"seed": 2**63}, "seed"),
    "max_tokens": ({"max_tokens": 2**63}, "max_tokens"),
    "top_k": ({"top_k": 2**63}, "top_k"),
    "min_tokens": ({"max_tokens": None, "min_tokens": 2**64}, "min_tokens"),
    "stream_interval": ({"stream_interval": 2**64}, "stream_interval"),
    "bias of NaN": ({"logit_bias": {5: math.nan}}, "logit_bias"),
    "bias beyond float32": ({"logit_bias": {5: -1e39}}, "logit_bias"),
    "penalty": ({"repetition_penalty": 1e31}, "repetition_penalty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(running: Engine, case: str) -> None:
    options, name = REFUSED[case]
    with pytest.raises(VLLMValidationError, match=name):
        running.generate([PROMPT[0]], [params(**options)])
    running.assert_idle()


SERVED: dict[str, dict[str, Any]] = {
    "the largest seed": {"seed": 2**63 - 1},
    "the last two seeds": {"n": 2, "seed": 2**63 - 2},
    "the smallest seed": {"seed": -(2**63), "n": 2},
    "max_tokens of 64 bits": {"max_tokens": 2**63 - 1, "seed": 1},
    "top_k": {"top_k": 2**63 - 1, "seed": 1},
    "denormal top_p": {"top_p": 5e-324, "seed": 1},
    "denormal min_p": {"min_p": 1e-46, "seed": 1},
    "denormal temperature": {"temperature": 5e-324},
    "large bias at the least temperature": {"logit_bias": {7: FLOAT32}, "temperature": 0.01},
    "penalised bias": {"logit_bias": {7: FLOAT32, 8: -FLOAT32}, "repetition_penalty": 1e-30},
    "divided bias": {"logit_bias": {7: FLOAT32, 8: -FLOAT32}, "repetition_penalty": 1e30},
    "banned by bias": {"logit_bias": {7: -math.inf}, "seed": 1},
    "denormal bias": {"logit_bias": {7: 1e-46}, "seed": 1},
}


@pytest.mark.parametrize("case", SERVED)
def test_served(running: Engine, case: str) -> None:
    """Catches overflow where numbers meet that are each in their range."""
    before = known(running)
    asked = params(ignore_eos=True, **SERVED[case])
    prompts = [{"prompt_token_ids": [20] * 9}]
    (output,) = running.llm.generate(prompts, [asked], use_tqdm=False)
    room = running.llm.model_config.max_model_len - 9
    for one in output.outputs:
        assert one.finish_reason == "length"
        assert len(one.token_ids) == min(asked.max_tokens, room)
    assert known(running) == before


def test_every_token_biased_down(running: Engine) -> None:
    """-FLOAT32 times a penalty of 1e30 is -inf, and a row of -inf has no distribution."""
    biases = dict.fromkeys(range(vocabulary(running)), -FLOAT32)
    asked = params(logit_bias=biases, repetition_penalty=1e30, seed=1, ignore_eos=True)
    ((tokens, reason),) = running.generate([PROMPT[0]], [asked])
    assert (len(tokens), reason) == (12, "length")


def contradictions(running: Engine) -> dict[str, tuple[dict[str, Any], list[str]]]:
    end = running.llm.get_tokenizer().eos_token_id
    every = list(range(vocabulary(running)))
    word = running.llm.get_tokenizer().decode([40])
    return {
        "only the end": ({"allowed_token_ids": [end], "min_tokens": 1}, ["allowed_token_ids"]),
        "all of it bad": ({"allowed_token_ids": [40], "bad_words": [word]}, ["bad_words"]),
        "all end": ({"stop_token_ids": every, "min_tokens": 2}, ["min_tokens"]),
        "all biased away": ({"logit_bias": dict.fromkeys(every, -math.inf)}, ["logit_bias"]),
        "the last one bad": (
            {"logit_bias": {t: -math.inf for t in every if t != 40}, "bad_words": [word]},
            ["logit_bias", "bad_words"],
        ),
    }


def test_contradictions_are_refused(running: Engine) -> None:
    """Catches rows that are -inf throughout, taken for a model that gives NaN."""
    for options, names in contradictions(running).values():
        with pytest.raises(VLLMValidationError, match="no token is left to choose") as refusal:
            running.generate([PROMPT[0]], [params(**options)])
        assert all(name in str(refusal.value) for name in names)


def test_what_is_almost_contradictory_is_served(running: Engine) -> None:
    end = running.llm.get_tokenizer().eos_token_id
    for options in (
        {"allowed_token_ids": [end, 40], "min_tokens": 12},
        {"stop_token_ids": [t for t in range(vocabulary(running)) if t != 40], "min_tokens": 12},
    ):
        ((tokens, reason),) = running.generate([PROMPT[0]], [params(**options)])
        assert (tokens, reason) == ([40] * 12, "length")


def test_who_leaves_no_token_ends_for_its_own_reason(
    running: Engine, monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    """What admission overlooks is not blamed on the model, and costs nobody's cached pages."""
    prompts = [[20] * 140, *PROMPT]
    calm = params(temperature=0, seed=3)
    before = running.generate(prompts, [calm] * 5)
    cached = len(running.block_pool.cached_block_hash_to_block)
    monkeypatch.setattr(front_end, "refuse_contradictions", lambda *_: None)
    # The first canvas is in order: what is ruled out there are the ends alone.
    options, _ = contradictions(running)["all end"]
    found = running.generate(prompts, [params(**options), *[calm] * 4])
    assert found[0] == ([], "error")
    assert found[1:] == before[1:]
    assert "its parameters leave no token to choose" in package_log.text
    assert "not finite" not in package_log.text
    assert len(running.block_pool.cached_block_hash_to_block) == cached > 0
    assert running.generate(prompts, [calm] * 5) == before


def test_who_cannot_be_taken_up_ends_alone(
    running: Engine, monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    """Catches one request's parameters that take the engine down."""
    before = known(running)
    original = row_options.RowOptions.from_params

    def broken(given: Any, *rest: Any) -> Any:
        if given.top_k == 17:
            raise OverflowError("a number that nobody thought of")
        return original(given, *rest)

    monkeypatch.setattr(row_options.RowOptions, "from_params", broken)
    calm = [params(temperature=0, seed=n, max_tokens=20) for n in range(4)]
    found = running.generate([PROMPT[0], *PROMPT], [params(top_k=17), *calm])
    assert found == [([], "error"), *before]
    assert "a number that nobody thought of" in package_log.text
    assert "its parameters could not be processed" in package_log.text
    running.assert_idle()


def test_a_step_in_flight_leaves_no_nan_behind(
    tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step of who is ended has begun: it reads NaN, and its pages go to others."""
    path = tmp_path_factory.mktemp("gemma")
    random_checkpoint(path, seed=1, canvas=32, sliding_window=16)
    options = {"limit_mm_per_prompt": {"image": 0, "video": 0}, "async_scheduling": True}
    with engine(path, 32, **options, num_gpu_blocks_override=9, max_model_len=256) as running:
        before = known(running)
        monkeypatch.setattr(front_end, "refuse_contradictions", lambda *_: None)
        asked, _ = contradictions(running)["all end"]
        found = running.generate([PROMPT[0]] * 4, [params(**asked)] * 4)
        assert found == [([], "error")] * 4
        # The worker hears of the ended requests with the next step.
        assert known(running) == before
        for layers in running.runner.model_state.pages.groups:
            assert all(layer.kv_cache.isfinite().all() for layer in layers)
