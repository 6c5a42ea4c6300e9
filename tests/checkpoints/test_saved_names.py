"""Names as wrappers leave them: read as the model's own, or refused."""

from __future__ import annotations

import pytest
import torch

from vllm_dllm.checkpoints.stored import Stored
from vllm_dllm.checkpoints.verify import verified

NAME = "model.layers.0.mlp.up_proj.weight"
EXPECTED = {NAME: Stored((4, 3)), "lm_head.weight": Stored((5, 3))}
HEAD = {"lm_head.weight": torch.ones(5, 3)}


def read(*names: str) -> list[str]:
    given = [(name, torch.ones(4, 3)) for name in names]
    return [name for name, _ in verified([*given, *HEAD.items()], EXPECTED, "X")][:-1]


@pytest.mark.parametrize(
    "name",
    [
        NAME,
        f"base_model.model.{NAME}",
        "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight",
        "model.layers.0.mlp.up_proj.base_layer.weight",
        f"_orig_mod.{NAME}",
        f"module.{NAME}",
        f"module._orig_mod.base_model.model.{NAME}",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight",
        f"model.{NAME}",
        NAME.removeprefix("model."),
    ],
)
def test_a_wrapper_takes_no_part(name: str) -> None:
    assert read(name) == [NAME]


def test_both_names_are_one_tensor() -> None:
    wrapped = f"module.{NAME}"
    assert read(NAME, wrapped) == [NAME, NAME]
    with pytest.raises(ValueError, match=f"'{NAME}': the checkpoint has two copies"):
        list(verified([(NAME, torch.ones(4, 3)), (wrapped, torch.zeros(4, 3))], EXPECTED, "X"))


@pytest.mark.parametrize("name", ["module.layers.0.up.weight", f"modules.{NAME}"])
def test_others_are_unexpected(name: str) -> None:
    with pytest.raises(ValueError, match=f"unexpected tensor '{name}'"):
        read(name)


def test_an_adapter_beside_the_weights_is_refused() -> None:
    """The weights may hold it, or not."""
    adapter = NAME.replace("weight", "lora_A.default.weight")
    with pytest.raises(ValueError, match=r"lora_A.* merge_and_unload"):
        read(NAME, adapter)


def test_a_resized_vocabulary_has_to_be_stated() -> None:
    def load(head: torch.Tensor) -> None:
        list(verified([(NAME, torch.ones(4, 3)), ("lm_head.weight", head)], EXPECTED, "X"))

    with pytest.raises(ValueError, match=r"shape \(8, 3\).* state vocab_size=8"):
        load(torch.ones(8, 3))
    for wrong in (torch.ones(8, 2), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"config.json asks for \(5, 3\)$"):
            load(wrong)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("lm_head.weight", torch.ones(5, 3).to(torch.float8_e4m3fn)),
        ("lm_head.weight_scale", torch.ones(5, 1)),
        ("lm_head.weight_packed", torch.ones(5, 1, dtype=torch.int32)),
    ],
)
def test_a_quantized_head_is_refused_as_one(name: str, stored: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=f"'{name}': a quantized lm_head is not supported"):
        list(verified([(name, stored)], EXPECTED, "X"))
