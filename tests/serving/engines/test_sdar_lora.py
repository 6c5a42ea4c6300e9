"""LoRA on a dense SDAR: each request its adapter's tokens, those of `transformers` when merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import adapter, merged
from tests.support.engine import Engine, engine, greedy
from tests.support.reference_sdar import Reference, Rule, random_checkpoint
from tests.support.sdar_requests import MARGIN, prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = 4
PAGE = 32
# Tokens of the prompt and to generate; most prompts fill pages of 32 tokens, which are cached.
SHAPES = ((3, 12), (34, 9), (64, 16), (71, 8), (100, 14))
RULES = (Rule(), Rule(threshold=0.3), Rule("LowConfidenceStatic", steps=2))
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "block_size": PAGE}
FUSED = {"additional_config": {"dllm": {"fused_commit": "on"}}, "async_scheduling": True}
ENGINES: dict[str, dict[str, Any]] = {
    # As many adapters as places: the rows of the base model must get none of them.
    "together": {"max_loras": 2, **FUSED},
    # One place for two adapters, which take turns; chunks of prompts.
    "in turn": {
        "max_loras": 1,
        "max_cpu_loras": 2,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
    },
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], list[Any]]:
    """A model, [no adapter, one, another], and (model's number, prompt, count, rule, answer)."""
    folder = tmp_path_factory.mktemp("lora")
    model = random_checkpoint(folder / "base", experts=False, block=BLOCK)
    extra = ["", "", "embed_tokens"]
    adapters = [None, *(adapter(model, folder / f"adapter{n}", n, extra[n]) for n in (1, 2))]
    cases = []
    for number, one in enumerate(adapters):
        path = model if one is None else merged(model, one, folder / f"merged{number}")
        reference = Reference(path)
        for n, (length, count) in enumerate(SHAPES):
            rule = RULES[n % len(RULES)]
            answer = reference.generate(prompt(n, length), count, rule, BLOCK)
            cases.append((number, prompt(n, length), count, rule, answer))
    return model, adapters, cases


def generate(running: Engine, adapters: list[Any], cases: list[Any]) -> list[tuple[Any, int]]:
    """Tokens of each case, and how many of its prompt came out of the cache."""
    from vllm.lora.request import LoRARequest

    loaded = [
        None if path is None else LoRARequest(f"a{n}", n, str(path))
        for n, path in enumerate(adapters)
    ]
    outputs = running.llm.generate(
        [{"prompt_token_ids": tokens} for _, tokens, *_ in cases],
        [greedy(count, ignore_eos=True, **rule.options()) for _, _, count, rule, _ in cases],
        lora_request=[loaded[number] for number, *_ in cases],
        use_tqdm=False,
    )
    return [(list(o.outputs[0].token_ids), o.num_cached_tokens) for o in outputs]


@pytest.mark.parametrize("name", ["together", pytest.param("in turn", marks=pytest.mark.long)])
def test_every_request_its_adapter(name: str, served: Any) -> None:
    """In one batch, in any order, alone, and out of the prefix cache, whose pages nobody shares."""
    model, adapters, cases = served
    robust = [n for n, case in enumerate(cases) if case[-1].margin > MARGIN]
    assert len(robust) >= len(cases) - 2
    by_model = {number: [c[-1].tokens for c in cases if c[0] == number] for number in range(3)}
    assert len({str(answers) for answers in by_model.values()}) == 3
    order = sorted(robust, key=lambda n: (n % len(SHAPES), n))  # models take turns in the batch
    with engine(model, BLOCK, **(LORA | {"diffusion_config": None} | ENGINES[name])) as running:
        for cached, numbers in enumerate((robust, order, order[::-1])):
            found = generate(running, adapters, [cases[n] for n in numbers])
            different = [
                n
                for n, (tokens, _) in zip(numbers, found, strict=True)
                if tokens != cases[n][-1].tokens
            ]
            assert not different
            # Each whole page of a prompt, but only once its own model has written it.
            lengths = [len(cases[n][1]) for n in numbers]
            whole = [(length - 1) // PAGE * PAGE * bool(cached) for length in lengths]
            assert [tokens for _, tokens in found] == whole
        for n in robust[:: len(SHAPES) // 2]:
            ((tokens, _),) = generate(running, adapters, [cases[n]])
            assert tokens == cases[n][-1].tokens, n
        running.assert_idle()


def test_an_adapter_of_the_head_is_refused(served: Any, tmp_path: Path) -> None:
    """vLLM would look up an adapter for each request, where a canvas has several rows."""
    from vllm.lora.request import LoRARequest

    model, *_ = served
    path = adapter(model, tmp_path / "head", 3, "lm_head")
    with (
        engine(model, BLOCK, **(LORA | {"diffusion_config": None})) as running,
        pytest.raises(ValueError, match="lm_head"),
    ):
        running.llm.llm_engine.add_lora(LoRARequest("head", 1, str(path)))
