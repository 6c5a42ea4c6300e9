"""Pictures of every shape are read; what the vision encoder cannot read ends its request alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support import reference_nemotron
from tests.support.checkpoints import TINY_GEMMA
from tests.support.engine import Engine, count_calls, engine, greedy
from tests.support.families import FAMILIES, Asked, dllm
from tests.support.long import long_but
from tests.support.reference import MARGIN, Answer
from tests.support.reference_vision import SHOWN, START, Pictured, picture

pytestmark = pytest.mark.engine

SIZES = ((96, 64), (8000, 20), (20, 8000), (1, 1), (3, 900))
TEXT = "<bos><|turn>user<|image|>what?<turn|><|turn>model"


@dataclass(frozen=True)
class Model:
    """A model that reads pictures.

    Attributes:
        name: for messages.
        question: a prompt with one picture.
        red: the value of a pixel in the encoder's input, from the part of 255 that is red.
        some: options of the processor that it reads.
        bad: options that it does not.
    """

    name: str
    make: Callable[[Path], Path]
    question: dict[str, Any]
    red: Callable[[float], float]
    some: dict[str, Any]
    bad: tuple[dict[str, Any], ...]
    options: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "gemma": Model(
        "DiffusionGemma",
        lambda path: TINY_GEMMA,
        {"prompt": TEXT},
        lambda part: part,
        {"max_soft_tokens": 560},
        (
            *({"patch_size": 8}, {"pooling_kernel_size": 1}, {"do_resize": False}),
            {"max_soft_tokens": 99},
        ),
        {"diffusion_config": {"canvas_length": 32}, "max_model_len": 1024},
    ),
    "sdar-vl": Model(
        "SDAR-VL",
        lambda path: FAMILIES["sdar-vl"].make(path, 4),
        {"prompt_token_ids": [5, SHOWN, 6]},
        lambda part: (part - 0.5) / 0.5,
        {},
        ({"do_resize": False}, {"size": {"height": 48, "width": 48}}),
    ),
    "nemotron-vlm": Model(
        "Nemotron-Labs-Diffusion-VLM",
        lambda path: FAMILIES["nemotron-vlm"].make(path, 8),
        {"prompt_token_ids": [5, START, 6]},
        lambda part: (part - 0.48145466) / 0.26862954,
        {"max_image_size": 56},
        ({"patch_size": 8}, {"max_image_size": 0}, {"max_image_size": "1"}),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def running(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    options: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_batched_tokens": 1024,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "diffusion_config": None,
    }
    with engine(model.make(tmp_path_factory.mktemp("model")), 0, **options | model.options) as it:
        yield it


def asked(
    model: Model, edges: tuple[int, int], color: int = 0, /, **options: Any
) -> dict[str, Any]:
    shown = Image.new("RGB", edges, (color, 50, 200))
    prompt = model.question | {"multi_modal_data": {"image": shown}}
    return prompt | ({"mm_processor_kwargs": options} if options else {})


def ends(running: Engine, prompts: list[dict[str, Any]]) -> list[str]:
    outputs = running.llm.generate(prompts, greedy(8, ignore_eos=True, seed=1), use_tqdm=False)
    running.assert_idle()
    return [str(output.outputs[0].finish_reason) for output in outputs]


def test_every_shape_is_read(model: Model, running: Engine) -> None:
    assert ends(running, [asked(model, size) for size in SIZES]) == ["length"] * len(SIZES)
    assert ends(running, [asked(model, (300, 200), **model.some)]) == ["length"]


def test_unreadable_pictures_are_refused(model: Model, running: Engine) -> None:
    from vllm.exceptions import VLLMValidationError

    for options in model.bad:
        with pytest.raises(ValueError, match=r"mm_processor_kwargs|max_soft_tokens"):
            ends(running, [asked(model, (96, 64), **options)])
    if model.name.startswith("Nemotron"):
        with pytest.raises(ValueError, match="one edge vanishes"):
            ends(running, [asked(model, (9000, 2))])
    two = [asked(model, (96, 64))["multi_modal_data"]["image"]] * 2
    with pytest.raises(VLLMValidationError, match=r"At most 1 image"):
        ends(running, [model.question | {"multi_modal_data": {"image": two}}])
    assert ends(running, [asked(model, (96, 64))]) == ["length"]


def test_a_picture_that_is_too_wide_is_refused(
    model: Model, running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not model.name.startswith("DiffusionGemma"):
        pytest.skip("it reads pictures of any width, or makes them narrower")
    vision = running.llm.model_config.hf_config.vision_config
    monkeypatch.setattr(vision, "position_embedding_size", 12)
    with pytest.raises(ValueError, match="patches wide or high, and the model has 12 positions"):
        ends(running, [asked(model, (960, 48))])


def test_embeddings_are_refused(model: Model, running: Engine) -> None:
    prompt = model.question | {"multi_modal_data": {"image": torch.zeros(1, 4, 128)}}
    with pytest.raises(ValueError, match=f"image_embeds: not read by {model.name}"):
        ends(running, [prompt])


def test_an_error_of_the_encoder_ends_its_request_alone(
    model: Model, running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch has other pictures; and the same picture is read once the encoder can."""
    encode = running.runner.model.embed_multimodal
    prompts = [asked(model, (96, 64), color) for color in (10, 20, 30)]
    broken = model.red(20 / 255)

    def raising(**inputs: Any) -> Any:
        if any(((one - broken).abs() < 1e-3).any() for one in inputs["pixel_values"]):
            raise RuntimeError("no memory")
        return encode(**inputs)

    monkeypatch.setattr(running.runner.model, "embed_multimodal", raising)
    assert ends(running, prompts) == ["length", "error", "length"]
    assert ends(running, prompts) == ["length", "error", "length"]
    monkeypatch.undo()
    assert ends(running, prompts) == ["length"] * 3


# ---- Masked models against their references

PAGE = 32
MASKED = ("sdar-vl", "nemotron-vlm")


@pytest.mark.parametrize("name", MASKED)
def test_features_are_the_published_ones(name: str, tmp_path: Path) -> None:
    """Within 1e-4 of the largest, whatever the size of the picture."""
    family = FAMILIES[name]
    family.make(tmp_path, 4)
    reference, seen = family.reference(tmp_path), []
    assert isinstance(reference, Pictured)
    sizes = [(n, 3 + 41 * n % 330, 2 + 67 * n % 260) for n in range(16)]
    with engine(tmp_path, 0, diffusion_config=None) as running:
        encode = running.runner.model.embed_multimodal
        running.runner.model.embed_multimodal = lambda **given: (
            seen.append(encode(**given)) or (seen[-1])
        )
        for size in sizes:
            one = Asked([5, reference.placeholder, 6], 1, [], {}, Answer(), [size])
            running.generate([one.shown()], [greedy(1)])
            (found,) = seen.pop()
            wanted = reference.features(picture(*size))
            assert found.shape == wanted.shape, size
            assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max(), size


@pytest.mark.parametrize(
    ("name", "ahead"),
    long_but(
        [("sdar-vl", True), ("nemotron-vlm", False)],
        [(name, ahead) for name in MASKED for ahead in (False, True)],
    ),
)
def test_prefixes_that_end_within_and_after_a_picture(
    name: str, ahead: bool, tmp_path: Path
) -> None:
    """Another picture in the same place shares nothing, and what follows one may differ."""
    family = FAMILIES[name]
    family.make(tmp_path, 4)
    reference = family.reference(tmp_path)
    assert isinstance(reference, Pictured)
    large, same_size = (1, 300, 200), (2, 300, 200)
    lead, shows = [9, 8, 7], reference.placeholder
    cases = [
        # A prompt, its picture, and how many of its tokens are in the cache by then, in pages.
        ([*lead, shows, 4], large, lambda inside, after: 0),
        ([*lead, shows, *range(30, 70)], large, lambda inside, after: inside),
        ([*lead, shows, *range(30, 70), 3, 4], large, lambda inside, after: after),
        ([*lead, shows, *range(30, 70)], same_size, lambda inside, after: 0),
    ]
    options = {"diffusion_config": None, "block_size": PAGE, "async_scheduling": ahead}
    with engine(tmp_path, 0, **options, max_num_batched_tokens=48, max_num_seqs=4) as running:
        encoded = count_calls(running.runner.model, "embed_multimodal")
        for prompt, size, cached in cases:
            one = Asked(prompt, 9, [], {}, Answer(), [size])
            expanded = reference.shown(prompt, [size])
            end = int(reference.where[-1]) + 1
            pages = [tokens // PAGE * PAGE for tokens in (end, len(expanded) - 2)]
            wanted = reference.generate(expanded, 9, family.default or family.rules[0])
            output = running.llm.generate([one.shown()], [one.params()], use_tqdm=False)[0]
            assert output.num_cached_tokens == cached(*pages), (prompt, pages)
            assert list(output.outputs[0].token_ids) == wanted.tokens
        assert pages[0] > PAGE and len(encoded) >= 2


@pytest.mark.parametrize("ahead", long_but([True], [False, True]))
def test_pictures_wait_for_each_other(ahead: bool, tmp_path: Path) -> None:
    """A block may have parts of two, for which vLLM's cache may have no room; nobody waits in vain.

    The answers show that chunks then end with blocks.
    """
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    family = FAMILIES["sdar-vl"]
    family.make(tmp_path, 4)
    reference, asked = family.reference(tmp_path), []
    assert isinstance(reference, Pictured)
    for n in range(4):
        sizes = [(10 * n + k, 90, 80) for k in range(3)]
        prompt = [*range(40, 43 + n), *[reference.placeholder] * 3, 7]
        wanted = reference.generate(reference.shown(prompt, sizes), 9, family.default)
        asked.append(Asked(prompt, 9, [], {}, wanted, sizes))
    count = len(reference.expanded(picture(*sizes[0]))[0])
    options: dict[str, Any] = {"diffusion_config": None, "async_scheduling": ahead}
    options |= {"long_prefill_token_threshold": 32}  # so that all prompts are read at a time
    with engine(tmp_path, 0, **options, max_num_batched_tokens=256, max_num_seqs=4) as running:
        held = running.scheduler.encoder_cache_manager = EncoderCacheManager(2 * count)
        running.scheduler.max_num_encoder_input_tokens = 2 * count
        released = count_calls(held, "free")
        params = [one.params() for one in asked]
        found = running.generate([one.shown() for one in asked], params)
        assert [tokens for tokens, _ in found] == [one.wanted.tokens for one in asked]
        assert len(released) > len(asked)
        running.assert_idle()


@pytest.mark.slow
def test_pictures_before_the_end_of_the_context(tmp_path: Path) -> None:
    """There the first step reads the prompt's last whole block again, but not its pictures."""
    family, context = FAMILIES["sdar-vl"], 80
    family.make(tmp_path, 32)
    reference, asked = family.reference(tmp_path), []
    assert isinstance(reference, Pictured)
    for n in range(8):
        prompt, sizes = [*range(40, 43 + n), reference.placeholder, 7], [(n, 76, 20)]
        shown = reference.shown(prompt, sizes)
        assert 32 < int(reference.where[-1]) < len(shown) < 64, "no block before the canvas"
        wanted = reference.generate(shown, 5, family.default, (), context)
        asked.append(Asked(prompt, 5, [], {}, wanted, sizes))
    options = {"diffusion_config": None, "async_scheduling": True} | dllm(fused_commit="on")
    with engine(tmp_path, 0, max_model_len=context, block_size=32, **options) as running:
        assert running.runner.model_state.parts.window is not None
        for _ in range(2):  # the second time, the picture comes out of the prefix cache
            params = [one.params() for one in asked]
            found = running.generate([one.shown() for one in asked], params)
            assert [tokens for tokens, _ in found] == [one.wanted.tokens for one in asked]


@pytest.mark.slow
def test_drafts_beside_pictures_are_verified(tmp_path: Path) -> None:
    """LinearSpec's answers are those of greedy decoding, whatever the prompt shows."""
    family = FAMILIES["nemotron-vlm"]
    family.make(tmp_path, 8)
    reference, asked = family.reference(tmp_path), []
    assert isinstance(reference, Pictured)
    for n in range(8):
        prompt = [*range(40, 43 + n), reference.placeholder, *range(60, 60 + 2 * n)]
        linear = {"diffusion_algorithm": "LinearSpec"}
        asked.append(Asked(prompt, 20, [], linear, Answer(), [(n, 20 + 19 * n, 90 - 7 * n)]))
    with engine(tmp_path, 0, diffusion_config=None) as running:
        params = [one.params() for one in asked]
        found = running.generate([one.shown() for one in asked], params)
    for one, (tokens, _) in zip(asked, found, strict=True):
        shown = reference.shown(one.prompt, one.pictures)
        margin = reference_nemotron.Reference.greedy_margin(reference, shown, tokens)  # type: ignore[arg-type]
        assert len(tokens) == 20 and margin > -MARGIN
