"""The tensors of a checkpoint and a model's: heads, copies, parts, and names as saved."""

from __future__ import annotations

import pytest
import torch

from vllm_dllm.checkpoints.stored import Stored
from vllm_dllm.checkpoints.verify import HEAD, KV_SCALES, verified

NAME, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
BODY = {NAME: Stored((4, 3)), NORM: Stored((4,))}
WHOLE = BODY | {HEAD: Stored((5, 3))}
FILE = {NAME: torch.ones(4, 3), NORM: torch.ones(4), HEAD: torch.ones(5, 3)}


def names(
    tensors: dict[str, torch.Tensor], expected: dict[str, Stored] = WHOLE, **more: bool
) -> list[str]:
    return [name for name, _ in verified(tensors.items(), expected, "X", **more)]


def named(*as_saved: str) -> list[str]:
    """What the names of one tensor in a file become."""
    rest = {name: tensor for name, tensor in FILE.items() if name != NAME}
    return names(dict.fromkeys(as_saved, FILE[NAME]) | rest)[: len(as_saved)]


def test_a_head_is_read_where_the_model_has_one_of_its_own() -> None:
    """Passed over where it is tied, and missed where it is not."""
    assert names(FILE) == list(WHOLE)
    assert names(FILE, BODY) == list(BODY)
    with pytest.raises(ValueError, match=HEAD):
        names({name: FILE[name] for name in BODY})


def test_scales_of_a_quantized_cache_are_passed_on() -> None:
    scale = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    with pytest.raises(ValueError, match=r"unexpected tensor .*k_scale"):
        names(FILE | scale)
    given = (FILE | scale).items()
    assert [n for n, _ in verified(given, WHOLE, "X", beside=KV_SCALES)] == [*WHOLE, *scale]


def test_an_update_may_come_in_parts() -> None:
    assert names({NORM: FILE[NORM]}, whole=False) == [NORM]
    for name, tensor, message in (
        ("other", torch.zeros(1), "unexpected tensor"),
        (HEAD, torch.zeros(1, 4), "has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            names({name: tensor}, whole=False)


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
    assert named(name) == [NAME]


def test_both_names_are_one_tensor() -> None:
    wrapped = f"module.{NAME}"
    assert named(NAME, wrapped) == [NAME, NAME]
    with pytest.raises(ValueError, match=f"'{NAME}': the checkpoint has two copies"):
        names({NAME: torch.ones(4, 3), wrapped: torch.zeros(4, 3)})


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("module.layers.0.up.weight", FILE[NAME], "unexpected tensor 'module.layers.0.up.weight'"),
        (f"modules.{NAME}", FILE[NAME], f"unexpected tensor 'modules.{NAME}'"),
        # The weights may hold an adapter beside them, or not.
        (NAME.replace("weight", "lora_A.default.weight"), FILE[NAME], "lora_A.* merge_and_unload"),
        (HEAD, torch.ones(8, 3), r"shape \(8, 3\).* state vocab_size=8"),
        (HEAD, torch.ones(8, 2), r"config.json asks for \(5, 3\)$"),
        (HEAD, torch.tensor(1.0), r"config.json asks for \(5, 3\)$"),
        *(
            (name, stored, f"'{name}': a quantized lm_head is not supported")
            for name, stored in (
                (HEAD, torch.ones(5, 3).to(torch.float8_e4m3fn)),
                ("lm_head.weight_scale", torch.ones(5, 1)),
                ("lm_head.weight_packed", torch.ones(5, 1, dtype=torch.int32)),
            )
        ),
    ],
)
def test_what_is_refused(name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        names(FILE | {name: tensor})
