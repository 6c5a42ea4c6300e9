"""Pictures of every shape are read; what the vision encoder cannot read ends its request alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from tests.support.checkpoints import TINY_GEMMA
from tests.support.engine import Engine, engine, greedy

pytestmark = pytest.mark.engine

QUESTION = "<bos><|turn>user<|image|>what?<turn|><|turn>model"
SIZES = ((96, 64), (8000, 20), (20, 8000), (1, 1), (3, 900))


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    options: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
    }
    with engine(TINY_GEMMA, 32, **options) as started:
        yield started


def asked(size: tuple[int, int], color: int = 0, **options: Any) -> dict[str, Any]:
    picture = Image.new("RGB", size, (color, 50, 200))
    prompt: dict[str, Any] = {"prompt": QUESTION, "multi_modal_data": {"image": picture}}
    return prompt | ({"mm_processor_kwargs": options} if options else {})


def ends(running: Engine, prompts: list[dict[str, Any]]) -> list[str]:
    outputs = running.llm.generate(prompts, greedy(8, ignore_eos=True, seed=1), use_tqdm=False)
    running.assert_idle()
    return [str(output.outputs[0].finish_reason) for output in outputs]


def test_every_shape_is_read(running: Engine) -> None:
    assert ends(running, [asked(size) for size in SIZES]) == ["length"] * len(SIZES)
    assert ends(running, [asked((300, 200), max_soft_tokens=560)]) == ["length"]


@pytest.mark.parametrize(
    "options",
    [{"patch_size": 8}, {"pooling_kernel_size": 1}, {"do_resize": False}, {"max_soft_tokens": 99}],
    ids=str,
)
def test_unreadable_patches_are_refused(running: Engine, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"mm_processor_kwargs|max_soft_tokens"):
        ends(running, [asked((96, 64), **options)])
    assert ends(running, [asked((96, 64))]) == ["length"]


def test_a_picture_that_is_too_wide_is_refused(
    running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision = running.llm.model_config.hf_config.vision_config
    monkeypatch.setattr(vision, "position_embedding_size", 12)
    with pytest.raises(ValueError, match="patches wide or high, and the model has 12 positions"):
        ends(running, [asked((960, 48))])


def test_embeddings_are_refused(running: Engine) -> None:
    import torch

    prompt = {"prompt": QUESTION, "multi_modal_data": {"image": torch.zeros(1, 4, 128)}}
    with pytest.raises(ValueError, match="image_embeds: not read by DiffusionGemma"):
        ends(running, [prompt])


def test_an_error_of_the_encoder_ends_its_request_alone(
    running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch has other pictures; and the same picture is read once the encoder can."""
    model = running.runner.model
    encode = model.embed_multimodal
    prompts = [asked((96, 64), color) for color in (10, 20, 30)]
    # Each color is a part of 255 in the patches.
    broken = 20 / 255

    def raising(**inputs: Any) -> Any:
        if ((inputs["pixel_values"] - broken).abs() < 1e-3).any():
            raise RuntimeError("no memory")
        return encode(**inputs)

    monkeypatch.setattr(model, "embed_multimodal", raising)
    assert ends(running, prompts) == ["length", "error", "length"]
    assert ends(running, prompts) == ["length", "error", "length"]
    monkeypatch.undo()
    assert ends(running, prompts) == ["length"] * 3
