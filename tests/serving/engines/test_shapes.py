"""Shapes that the golden vectors do not have, against the tests' own full-recompute reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import oracle
from tests.support.engine import engine, greedy
from tests.support.reference import MARGIN, Rule
from tests.support.reference_llada2 import Reference, random_checkpoint

pytestmark = pytest.mark.engine

SHAPES: dict[str, dict[str, Any]] = {
    "hidden-is-not-heads-times-dim": {"block": 16, "hidden_size": 64, "num_attention_heads": 3,
                                      "num_key_value_heads": 1},
    "top-3-of-four-groups": {"block": 8, "num_experts": 16, "num_experts_per_tok": 3,
                             "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2},
    "mask-in-the-middle-tied-head": {"block": 32, "mask_token_id": 150, "tie_word_embeddings": True,
                                     "rope_theta": 10000},
}  # fmt: skip
LENGTHS = (1, 7, 16, 33, 50)


def prompts(vocabulary: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, vocabulary - 5, (n,), generator=generator).tolist()  # noqa: E731
    return [draw(n) for n in LENGTHS]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_against_reference(shape: str, seed: int, tmp_path: Path) -> None:
    options = dict(SHAPES[shape])
    block = options.pop("block")
    config = random_checkpoint(tmp_path, seed, **options)
    vocabulary = config["vocab_size"]
    mask, end = config.get("mask_token_id", vocabulary - 1), vocabulary - 4
    reference = Reference.load(tmp_path, block, mask)
    asked = prompts(vocabulary, seed)
    wanted = [reference.generate(prompt, 40, Rule(threshold=0.6), (end,)) for prompt in asked]
    robust = [i for i, answer in enumerate(wanted) if answer.margin > MARGIN]
    assert len(robust) >= 3, "the reference met too many near ties to test anything"
    with engine(tmp_path, block) as running:
        got = running.generate(asked, [greedy(40, diffusion_threshold=0.6) for _ in asked])
        for i in robust:
            assert got[i][0] == wanted[i].tokens, f"prompt of {LENGTHS[i]} tokens"
        running.assert_idle()


def test_experts_are_chosen_in_float32(tmp_path: Path) -> None:
    """In bfloat16 too, as in the authors' code; vLLM's backbone would round the scores first."""
    from vllm_dllm.families.llada2.model import LLaDA2Moe

    random_checkpoint(tmp_path, 0)
    with engine(tmp_path, 16, dtype="bfloat16") as running:
        layers = [m for m in running.runner.model.modules() if isinstance(m, LLaDA2Moe)]
        assert len(layers) == 2
        seen: set[torch.dtype] = set()
        for layer in layers:
            layer.experts.register_forward_pre_hook(
                lambda module, args, kwargs: seen.add(kwargs["router_logits"].dtype),
                with_kwargs=True,
            )
        assert len(running.generate([[5, 6, 7]], [greedy(20, ignore_eos=True)])[0][0]) == 20
        assert seen == {torch.float32}


@pytest.mark.parametrize("name", ["ckpt_a_b32", "ckpt_b_b8"])
def test_reference_equals_golden(name: str) -> None:
    """The reference that stands in for the golden vectors above agrees with them."""
    golden = oracle.checkpoint(name)
    reference = Reference.load(golden.path, golden.block_size, golden.mask_token_id)
    for prompt in golden.prompts.values():
        rows = prompt.logits["prompt_only"]
        values = reference.logits(prompt.tokens)[rows["rows"]]
        torch.testing.assert_close(values, torch.tensor(rows["values"]), atol=2e-4, rtol=0)
    short = [c for c in oracle.robust_primary(golden, "low_confidence") if c.prompt == "p7"]
    for case in short:
        end = () if case.params["ignore_eos"] else tuple(case.params["eos_token_ids"])
        rule = Rule(threshold=case.params["threshold"])
        prompt = golden.prompts[case.prompt].tokens
        found = reference.generate(prompt, case.params["max_new_tokens"], rule, end)
        assert found.tokens == case.output
