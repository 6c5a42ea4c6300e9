from __future__ import annotations

import pytest

from vllm_dllm.decoding import LowConfidence, algorithm_names, get_algorithm
from vllm_dllm.decoding.base import register_algorithm


def test_names() -> None:
    assert "LowConfidence" in algorithm_names()
    assert get_algorithm("LowConfidence").parameters == ("threshold",)


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"unknown decoding algorithm 'Nope'.*LowConfidence"):
        get_algorithm("Nope")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="registered twice"):
        register_algorithm(LowConfidence)
