"""New weights in a running engine: its tokens are those of an engine that began with them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from tests.engine.test_kv_transfer import MODELS, files_in, start
from tests.engine.test_traces import FAMILIES, completions, mixed
from tests.support.checkpoints import TEXT_ONLY_OPTIONS
from tests.support.engine import Engine, engine, greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Weights = dict[str, torch.Tensor]


@dataclass
class NoInfo(WeightTransferInitInfo):
    pass


@dataclass
class Part(WeightTransferUpdateInfo):
    weights: Weights


class FromThisProcess(WeightTransferEngine[NoInfo, Part]):
    """What vLLM's engines for GPUs do with what they receive, for tensors that are here already."""

    init_info_cls = NoInfo
    update_info_cls = Part

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Part) -> None:
        self.model.load_weights(list(update_info.weights.items()))

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine("this-process", FromThisProcess)
TRANSFER = {"weight_transfer_config": {"backend": "this-process"}}


def changed(path: Path, folder: Path) -> Path:
    """Write a copy of a checkpoint whose matrices and vectors have a quarter of noise in them."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    torch.manual_seed(1)
    weights = {
        name: tensor + (0.25 * tensor.float().std() * torch.randn(tensor.shape)).to(tensor)
        if tensor.is_floating_point() and tensor.numel() > 1
        else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def tensors_of(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


def parts(weights: Weights, size: int) -> Iterator[Weights]:
    """Parts of some tensors each, in an order that tears layers, experts and halves apart."""
    names = sorted(weights, key=lambda name: name[::-1])
    for first in range(0, len(names), size):
        yield {name: weights[name] for name in names[first : first + size]}


def send(running: Engine, weights: Weights, size: int) -> None:
    llm = running.llm
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    for part in parts(weights, size):
        llm.update_weights({"update_info": {"weights": part}})
    llm.finish_weight_update("the next one")
    assert llm.get_weight_version() == "the next one"


def answers(running: Engine, asked: list[Any]) -> list[list[list[int]]]:
    assert running.llm.reset_prefix_cache()
    return [[list(o.token_ids) for o in outputs] for outputs in completions(running, asked, {})]


def options_of(family: str) -> dict[str, Any]:
    return TRANSFER | (TEXT_ONLY_OPTIONS if family == "gemma" else {})


MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"enforce_eager": False},
    "bfloat16": {"dtype": "bfloat16"},
    "compiled, bfloat16": {"enforce_eager": False, "dtype": "bfloat16"},
}
CASES = [
    pytest.param(
        family,
        mode,
        id=f"{family}, {mode}",
        marks=() if (family, mode) == ("llada2", "eager") else pytest.mark.long,
    )
    for family in FAMILIES
    for mode in MODES
]


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_new_weights(family: str, mode: str, tmp_path: Path) -> None:
    path, length, _, _ = FAMILIES[family]
    options = options_of(family) | MODES[mode]
    asked = list(mixed(family, 12))
    new = changed(path, tmp_path / "changed")
    with engine(new, length, **options) as running:
        wanted = answers(running, asked)
    with engine(path, length, **options) as running:
        old = answers(running, asked)
        assert old != wanted, "the change of weights shows"
        llm = running.llm
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
        assert answers(running, asked) == wanted
        send(running, tensors_of(path), size=7)
        assert answers(running, asked) == old
        weights = list(tensors_of(new).items())
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        assert answers(running, asked) == wanted


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.long) for f in ("gemma", "sdar")] + ["llada2"]
)
def test_invented_weights_are_replaced(family: str, tmp_path: Path) -> None:
    """A trainer that sends all weights anyway starts the engine with ``--load-format dummy``."""
    path, length, _, _ = FAMILIES[family]
    asked = list(mixed(family, 6))
    with engine(path, length, **options_of(family)) as running:
        wanted = answers(running, asked)
    with engine(path, length, load_format="dummy", **options_of(family)) as running:
        assert answers(running, asked) != wanted
        send(running, tensors_of(path), size=40)
        assert answers(running, asked) == wanted


def test_a_wrong_update_is_refused() -> None:
    """By the tensor's name; and what it left half-way is not taken for weights."""
    path, length, _, _ = FAMILIES["sdar"]
    right = tensors_of(path)
    name = "model.layers.1.mlp.down_proj.weight"
    with engine(path, length, **TRANSFER) as running:
        running.llm.start_weight_update()
        with pytest.raises(ValueError, match=rf"{name}.*shape"):
            running.llm.update_weights({"update_info": {"weights": {name: right[name].T}}})
        running.llm.start_weight_update()
        with pytest.raises(ValueError, match=r"half-way.*start the engine again"):
            running.llm.update_weights({"update_info": {"weights": right}})


def test_an_update_in_the_middle_of_answers() -> None:
    """Paused requests keep their place, and go on when the engine wakes up."""
    path, length, _, _ = FAMILIES["sdar"]
    with engine(path, length, **TRANSFER) as running:
        params = [greedy(40 + 8 * i, ignore_eos=True) for i in range(4)]
        prompts = [list(range(5, 25 + i)) for i in range(4)]
        alone = running.generate(prompts, params)
        for number, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
            running.llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, asked)
        ended: dict[str, list[int]] = {}
        for step in range(2000):
            if step == 9:
                running.llm.sleep(level=0, mode="keep")
                send(
                    running, tensors_of(path), size=11
                )  # the same, so that answers can be compared
                running.llm.wake_up(tags=["scheduling"])
            for output in running.llm.llm_engine.step():
                if output.finished:
                    ended[output.request_id] = list(output.outputs[0].token_ids)
            if len(ended) == 4:
                break
        assert [ended[str(number)] for number in range(4)] == [ids for ids, _ in alone]
        running.assert_idle()


def test_stored_keys_and_values_forbid_an_update(tmp_path: Path) -> None:
    """They are addressed by the checkpoint, and would be taken for those of the new weights."""
    model = MODELS["sdar"]
    with (
        start(model, files_in(tmp_path, "kv_both"), **TRANSFER) as running,
        pytest.raises(ValueError, match=r"cannot be updated .* --kv-transfer-config"),
    ):
        send(running, tensors_of(model.path), size=40)
