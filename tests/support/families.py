"""Families whose engines are compared with a reference: checkpoints, rules, requests, schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support import (
    reference_diffcoder,
    reference_dream,
    reference_fast_dllm,
    reference_llada22,
    reference_nemotron,
    reference_openpangu,
    reference_sdar,
    reference_vision,
)
from tests.support.engine import count_calls, engine, greedy
from tests.support.reference import MARGIN, Answer, Reference, Rule
from tests.support.reference_vision import Pictured, Size, picture

# The longest prompts fill it to the last token; no canvas of a tested length ends elsewhere.
CONTEXT = 192
PAGE = 32
AHEAD: dict[str, Any] = {"async_scheduling": True}
# Chunks of a prompt, and what is cached is read again the second time.
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "block_size": PAGE}
# So few pages that running requests take them from each other.
FEW: dict[str, Any] = {"num_gpu_blocks_override": 10, "block_size": PAGE}


def dllm(**settings: Any) -> dict[str, Any]:
    return {"additional_config": {"dllm": settings}}


SYNC = dllm(execution="sync")
FUSED = AHEAD | dllm(fused_commit="on")
# Ways to schedule the same requests; none may change a token.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a step ahead": AHEAD,
    "sync": SYNC,
    "sync, a step ahead": AHEAD | SYNC,
    "chunks": CHUNKS,
    # With so few requests two blocks would be the choice, which has ways of its own.
    "chunks, a step ahead": AHEAD | CHUNKS | dllm(fused_commit="off"),
    "preempted": FEW,
    "preempted, a step ahead": AHEAD | FEW,
    "preempted, sync, a step ahead": AHEAD | FEW | SYNC,
    "every canvas is committed": dllm(skip_last_commit=False),
    "no canvas ends early": dllm(eos_early_stop=False),
    "compiled": {"enforce_eager": False},
}
# Every step reads the block before a canvas, too.
TWO_BLOCKS: dict[str, dict[str, Any]] = {
    "two blocks": FUSED,
    "two blocks, sync": AHEAD | dllm(fused_commit="on", execution="sync"),
    "two blocks, chunks": FUSED | CHUNKS,
    "two blocks, preempted": FUSED | FEW,
}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        model: the class that serves it.
        make: writes a checkpoint with blocks of this length to a folder.
        rules: what its requests ask for.
        odd: special tokens, which are tokens like others in a prompt.
        default: the rule of a request that asks for none.
    """

    model: str
    make: Callable[[Path, int], Any]
    reference: Callable[[Path], Reference]
    rules: tuple[Any, ...]
    odd: tuple[int, ...]
    ways: dict[str, dict[str, Any]]
    default: Any = None


def _sdar(experts: bool) -> Family:
    rule = reference_sdar.Rule
    return Family(
        "SDARMoeForCausalLM" if experts else "SDARForCausalLM",
        lambda path, block: reference_sdar.random_checkpoint(path, experts, block, block == 8),
        reference_sdar.Reference,
        (
            *(rule(), rule(threshold=0.2), rule(threshold=0.5, steps=2)),
            *(rule("LowConfidenceStatic", steps=n) for n in (None, 3)),
            *(rule("Sequential", steps=n) for n in (2, None)),
            *(rule("EntropyBounded"), rule("EntropyBounded", entropy_bound=6.0)),
            *(rule(threshold=0.3, steps=3), rule("EntropyBounded", entropy_bound=3.0)),
        ),
        (),
        WAYS | TWO_BLOCKS,
        reference_sdar.Rule(),
    )


def _sdar_vl() -> Family:
    text = _sdar(experts=False)
    return replace(
        text,
        model="SDARVForConditionalGeneration",
        make=reference_vision.sdar_checkpoint,
        reference=reference_vision.Sdar,
        odd=(reference_vision.MASK, reference_vision.SHOWN + 1),
    )


_EDITS = reference_llada22.Rule(299, 290, 291, threshold=0.3, max_post_edit_steps=4)
_NEMOTRON, _DIFFCODER = reference_nemotron.Rule, reference_diffcoder.Rule
_FAST, _DREAM, _PANGU = reference_fast_dllm.Rule, reference_dream.Rule, reference_openpangu.Rule
FAMILIES: dict[str, Family] = {
    "sdar": _sdar(experts=False),
    "sdar with experts": _sdar(experts=True),
    "diffcoder": Family(
        "StableDiffcoderForCausalLM",
        lambda path, block: reference_diffcoder.random_checkpoint(path, block_size=block),
        reference_diffcoder.Reference,
        (
            *(_DIFFCODER(), _DIFFCODER(threshold=0.3), _DIFFCODER("LowConfidenceEven")),
            *(_DIFFCODER("LowConfidenceEven", steps=n) for n in (1, 2, 3)),
            _DIFFCODER(threshold=0.6),
        ),
        (reference_diffcoder.MASK,),
        WAYS | TWO_BLOCKS,
        _DIFFCODER(),
    ),
    "nemotron": Family(
        "NemotronLabsDiffusionModel",
        lambda path, block: reference_nemotron.random_checkpoint(path, block),
        reference_nemotron.Reference,
        (
            *(_NEMOTRON(), _NEMOTRON(threshold=0.2), _NEMOTRON("LowConfidenceEven")),
            *(_NEMOTRON(threshold=0.1, max_steps=3), _NEMOTRON("LowConfidenceEven", steps=3)),
            *(_NEMOTRON("Leftmost"), _NEMOTRON(threshold=0.5), _NEMOTRON("Leftmost", steps=2)),
        ),
        (reference_nemotron.MASK,),
        WAYS,
        _NEMOTRON(),
    ),
    "sdar-vl": _sdar_vl(),
    "fast-dllm": Family(
        "Fast_dLLM_QwenForCausalLM",
        lambda path, block: reference_fast_dllm.random_checkpoint(path, block, block == 8),
        reference_fast_dllm.Reference,
        (
            *(_FAST(), _FAST(threshold=0.5), _FAST(threshold=0.2)),
            *(_FAST(threshold=0.3, sub_block_length=2), _FAST(sub_block_length=4)),
        ),
        (reference_fast_dllm.MASK,),
        WAYS,
        _FAST(),
    ),
    "dream": Family(
        "DreamForCausalLM",
        reference_dream.random_checkpoint,
        reference_dream.Reference,
        (
            *(_DREAM(), _DREAM("LowConfidenceStatic"), _DREAM("TokenEntropyBounded")),
            *(_DREAM(threshold=0.2), _DREAM("LowConfidenceStatic", steps=3)),
            *(_DREAM("TokenEntropyBounded", steps=3, entropy_bound=0.1), _DREAM("Sequential")),
            *(_DREAM(threshold=0.5, steps=3), _DREAM("Sequential", steps=2)),
            *(_DREAM("TokenEntropyBounded", entropy_bound=0.5), _DREAM(threshold=0.3, steps=40)),
        ),
        (reference_dream.MASK,),
        WAYS | TWO_BLOCKS,
        _DREAM(),
    ),
    "openpangu": Family(
        "OpenPanguDiffusionForCausalLM",
        reference_openpangu.random_checkpoint,
        reference_openpangu.Reference,
        (
            *(_PANGU(), _PANGU(threshold=0.2), _PANGU(sub_block_length=4)),
            *(_PANGU(threshold=0.3, sub_block_length=2), _PANGU(threshold=0.5)),
            *(_PANGU(threshold=0.1, sub_block_length=8), _PANGU(sub_block_length=8)),
        ),
        (reference_openpangu.MASK,),
        WAYS,
        _PANGU(),
    ),
    "llada2.2": Family(
        "LLaDA22MoeModelLM",
        reference_llada22.random_checkpoint22,
        reference_llada22.Reference22,
        (
            _EDITS,
            replace(_EDITS, threshold=0.6, steps=3),
            replace(_EDITS, edit_threshold=0.2),
            # It shares the batches of the editing rule, which asks for more of each row.
            Rule(threshold=0.3),
            replace(_EDITS, max_post_edit_steps=0),
            replace(_EDITS, threshold=1.0, steps=12, edit_threshold=0.4, max_post_edit_steps=2),
            replace(_EDITS, edit_threshold=1.0, max_post_edit_steps=1),
        ),
        (299, 290, 291),
        WAYS | TWO_BLOCKS,
    ),
}
FAMILIES["nemotron-vlm"] = replace(
    FAMILIES["nemotron"],
    model="NemotronLabsDiffusionVLMModel",
    make=reference_vision.nemotron_checkpoint,
    reference=reference_vision.Nemotron,
    odd=(reference_nemotron.MASK, reference_vision.PAD, reference_vision.STOP),
)
# Every request has another rule than the one before it, and blocks end inside of answers.
COUNTS = (5, 13, 1, 16, 33, 24, 8, 21, 40, 30, 17)


def lengths(block: int) -> list[int]:
    """Around the bounds of one block and of two, of pages, and of the context."""
    edges = {1, 2, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1}
    return [*sorted(edges), 31, 32, 33, 61, 64, 96, 97, 115, 130, 160, 185, CONTEXT - 1]


def prompt(number: int, length: int, odd: Sequence[int] = ()) -> list[int]:
    """Any tokens; in every other prompt some are special ones."""
    found = [(37 * i * i + 11 * i + number) % 289 for i in range(1, length + 1)]
    if odd and number % 2:
        found[-1] = odd[number // 2 % len(odd)]
        found[length // 2] = odd[0]
    return found


@dataclass(frozen=True)
class Asked:
    """One request, and what the reference makes of it; `pictures` are shown in its prompt."""

    prompt: list[int]
    max_tokens: int
    stop: list[int]
    options: dict[str, Any]
    wanted: Answer
    pictures: list[Size] = field(default_factory=list)

    @property
    def robust(self) -> bool:
        return self.wanted.margin > MARGIN

    def shown(self) -> dict[str, Any]:
        """The prompt as vLLM takes it."""
        pictures = [picture(*size) for size in self.pictures]
        shown = {"multi_modal_data": {"image": pictures}} if pictures else {}
        return {"prompt_token_ids": self.prompt, **shown}

    def params(self) -> Any:
        return greedy(self.max_tokens, ignore_eos=True, stop_token_ids=self.stop, **self.options)


def requests(name: str, model: Path, block: int) -> list[Asked]:
    """Requests of every rule; some answers end early, in a shifted model at boundary tokens."""
    family, asked = FAMILIES[name], []
    reference = family.reference(model)
    # Of models that read pictures, twice as many requests, most with one or two.
    pictured = isinstance(reference, Pictured)
    for n, length in enumerate(lengths(block) * (1 + pictured)):
        rule, count = family.rules[n % len(family.rules)], COUNTS[n % len(COUNTS)]
        given = own = prompt(n, length, family.odd)
        pictures: list[Size] = []
        if isinstance(reference, Pictured):
            own, pictures = reference.with_pictures(n, given)
            given = reference.shown(own, pictures)
            assert len(given) == length
        wanted = reference.generate(given, count, rule, (), CONTEXT)
        stop: list[int] = []
        if n % 3 == 1 and len(wanted.tokens) > 5:
            stop = [_new_token(wanted, at_boundary=reference.shifted and n % 2 == 1)]
            wanted = reference.generate(given, count, rule, tuple(stop), CONTEXT)
        options = {} if rule == family.default else rule.options()
        asked.append(Asked(own, count, stop, options, wanted, pictures))
    robust = [one for one in asked if one.robust]
    assert len(robust) >= len(asked) - 3, "too many near ties to compare"
    assert any(len(one.wanted.tokens) < one.max_tokens and one.stop for one in robust)
    shown = {size for one in robust for size in one.pictures}
    assert not pictured or (len(robust) >= 36 and len(shown) >= 15), "too few pictures"
    return asked


def _new_token(answer: Answer, at_boundary: bool) -> int:
    new = [n for n, token in enumerate(answer.tokens) if token not in answer.tokens[:n]]
    behind = [n for n in new if n >= 4 and (n in answer.boundaries) == at_boundary]
    return answer.tokens[(behind or new)[0]]


def assert_equal(name: str, asked: Sequence[Asked], tokens: Sequence[list[int]]) -> None:
    pairs = enumerate(zip(asked, tokens, strict=True))
    different = [n for n, (one, got) in pairs if one.robust and got != one.wanted.tokens]
    assert not different, (name, different)


def assert_served(model: Path, block: int, family: str, way: str, asked: list[Asked]) -> None:
    """One engine's tokens: together, again out of the cache, and alone."""
    # The checkpoint alone says how long its blocks are.
    own = {"diffusion_config": None, "max_model_len": CONTEXT}
    prompts, params = [one.shown() for one in asked], [one.params() for one in asked]
    with engine(model, block, **(own | FAMILIES[family].ways[way])) as running:
        assert type(running.runner.model).__name__ == FAMILIES[family].model
        assert running.slots.length == block
        assert (running.runner.model_state.parts.window is not None) == way.startswith("two blocks")
        preempted = count_calls(running.scheduler, "_preempt_request")
        for _ in range(2):
            assert_equal(way, asked, [t for t, _ in running.generate(prompts, params)])
        assert bool(preempted) == way.startswith(("preempted", "two blocks, preempted"))
        alone = [running.generate([p], [q])[0][0] for p, q in zip(prompts, params, strict=True)]
        assert_equal(f"{way}, alone", asked, alone)
        running.assert_idle()
