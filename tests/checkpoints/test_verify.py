"""A head in the file: read where the model has one of its own, passed over where it is tied."""

from __future__ import annotations

import pytest
import torch

from vllm_dllm.checkpoints.stored import Stored
from vllm_dllm.checkpoints.verify import HEAD, KV_SCALES, verified

BODY = {"model.norm.weight": Stored((4,))}
FILE = {"model.norm.weight": torch.ones(4), HEAD: torch.ones(8, 4)}


def names(expected: dict[str, Stored], tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, _ in verified(tensors.items(), expected, "X")]


def test_tied_head_is_passed_over() -> None:
    assert names(BODY, FILE) == list(BODY)


def test_own_head_is_read() -> None:
    assert names(BODY | {HEAD: Stored((8, 4))}, FILE) == [*BODY, HEAD]


def test_scales_of_a_quantized_cache_are_passed_on() -> None:
    scale = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    with pytest.raises(ValueError, match=r"unexpected tensor .*k_scale"):
        names(BODY, FILE | scale)
    given = (FILE | scale).items()
    assert [n for n, _ in verified(given, BODY, "X", beside=KV_SCALES)] == [*BODY, *scale]


def test_own_head_is_missed() -> None:
    with pytest.raises(ValueError, match=HEAD):
        names(BODY | {HEAD: Stored((8, 4))}, {name: FILE[name] for name in BODY})


def test_an_update_may_come_in_parts() -> None:
    expected, part = BODY | {HEAD: Stored((8, 4))}, {name: FILE[name] for name in BODY}
    assert [n for n, _ in verified(part.items(), expected, "X", whole=False)] == list(part)
    with pytest.raises(ValueError, match="unexpected tensor"):
        list(verified([("other", torch.zeros(1))], expected, "X", whole=False))
    with pytest.raises(ValueError, match="has shape"):
        list(verified([(HEAD, torch.zeros(1, 4))], expected, "X", whole=False))


def test_two_copies_of_a_tensor_must_be_equal() -> None:
    """DiffusionGemma's encoder and decoder share tensors, which a checkpoint may have twice."""
    numbers = torch.randn(40, 100)
    for tensor in (numbers, numbers[0, :1]):
        expected = {"weight": Stored(tuple(tensor.shape))}

        def loaded(copy: torch.Tensor, **more: bool) -> list[str]:
            both = [("encoder.weight", tensor), ("decoder.weight", copy)]  # noqa: B023
            one_name = "weight".format
            return [name for name, _ in verified(both, expected, "X", one_name, **more)]  # noqa: B023

        assert loaded(tensor.clone()) == ["encoder.weight", "decoder.weight"]
        with pytest.raises(ValueError, match=r"'encoder.weight' and 'decoder.weight'.*they differ"):
            loaded(tensor + 1e-6)
        assert len(loaded(tensor + 1e-6, whole=False)) == 2
