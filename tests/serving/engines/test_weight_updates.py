"""New weights in a running engine: its tokens are those of an engine that began with them."""

from __future__ import annotations

import itertools
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

from tests.serving.engines.test_kv_transfer import MODELS, files_in, start
from tests.support.checkpoints import ROOT, TEXT_ONLY_OPTIONS
from tests.support.drive import Driver
from tests.support.engine import Engine, engine, greedy
from tests.support.long import long_but
from tests.support.mixed_requests import FAMILIES, completions, mixed
from tests.support.reference_sdar import random_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Weights = dict[str, torch.Tensor]
QUANTIZED = ROOT / "examples" / "quantize" / "checkpoints"


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
TRAINER = {"worker_extension_cls": "tests.support.trainer_side.Receiver"}


def changed(path: Path, folder: Path) -> Path:
    """Write a copy of a checkpoint whose matrices and vectors have a half of noise in them."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    torch.manual_seed(1)
    weights = {
        name: tensor + (0.5 * tensor.float().std() * torch.randn(tensor.shape)).to(tensor)
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


def load(running: Engine, weights: Weights, size: int) -> None:
    """Send weights as the worker extensions of trainers do, some tensors at a time."""
    for part in parts(weights, size):
        running.llm.collective_rpc("receive", args=(list(part.items()),))


def reload(running: Engine, weights: Weights) -> None:
    iterator = list(weights.items())
    running.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iterator})


def experts_of(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if ".experts." in name}


def answers(running: Engine, asked: list[Any]) -> list[list[list[int]]]:
    assert running.llm.reset_prefix_cache()
    return [[list(o.token_ids) for o in outputs] for outputs in completions(running, asked, {})]


def options_of(family: str) -> dict[str, Any]:
    return TRANSFER | TRAINER | (TEXT_ONLY_OPTIONS if family == "gemma" else {})


MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"enforce_eager": False},
    "bfloat16": {"dtype": "bfloat16"},
    "compiled, bfloat16": {"enforce_eager": False, "dtype": "bfloat16"},
    # The workers' processes know the trainer's extension, but no transfer of this module.
    "two workers": {"tensor_parallel_size": 2},
}
EXPERTS = "sdar with experts"
QUICK = {("llada2", "eager"), (EXPERTS, "eager")}


@pytest.mark.parametrize(
    ("family", "mode"), long_but(QUICK, [*itertools.product(FAMILIES, MODES), (EXPERTS, "eager")])
)
def test_new_weights_from_a_worker_extension(family: str, mode: str, tmp_path: Path) -> None:
    """And from a reload or a transfer: a tensor at a time, in buckets, at once, and back again.

    Of SDAR with experts the head is tied; vLLM packs the shared matrix for the embedding and for
    the head, and both are renewed.
    """
    if family == EXPERTS:
        path, length = random_checkpoint(tmp_path / "sdar", experts=True, block=4, tied=True), 4
        plain = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.0, "extra_args": {}}
        asked = [(list(range(5, 25 + i)), plain) for i in range(12)]
    else:
        path, length, _, _ = FAMILIES[family]
        asked = list(mixed(family, 12))
    options, alone = options_of(family) | MODES[mode], mode != "two workers"
    if not alone:
        del options["weight_transfer_config"]
    new = changed(path, tmp_path / "changed")
    before, after = tensors_of(path), tensors_of(new)
    with engine(new, length, **options) as running:
        wanted = answers(running, asked)
    with engine(path, length, **options) as running:
        old = answers(running, asked)
        assert old != wanted, "the change of weights shows"
        if alone:
            named = {"weights_path": str(new)}
            running.llm.collective_rpc("reload_weights", kwargs=named)
            assert answers(running, asked) == wanted
            send(running, before, size=7)
            assert answers(running, asked) == old
        if experts_of(after) and family != EXPERTS:
            reload(running, before | experts_of(after))
            with_new_experts = answers(running, asked)
            reload(running, before)
            load(running, experts_of(after), size=1)
            assert answers(running, asked) == with_new_experts
            load(running, experts_of(before), size=1)
            assert answers(running, asked) == old
        load(running, after, size=1)
        assert answers(running, asked) == wanted
        load(running, before, size=7)
        assert answers(running, asked) == old
        load(running, after, size=len(after))
        assert answers(running, asked) == wanted
        reload(running, before)
        assert answers(running, asked) == old


def test_a_wrong_bucket_changes_nothing() -> None:
    """A tensor in its midst has a wrong shape; the next bucket is taken as ever."""
    path, length, _, _ = FAMILIES["sdar"]
    asked = list(mixed("sdar", 6))
    right = tensors_of(path)
    bucket = {name: torch.zeros_like(tensor) for name, tensor in right.items()}
    name = "model.layers.3.mlp.down_proj.weight"
    bucket[name] = bucket[name].T.contiguous()
    with engine(path, length, **TRAINER) as running:
        old = answers(running, asked)
        with pytest.raises(ValueError, match=rf"{name}.*shape"):
            load(running, bucket, size=len(bucket))
        with pytest.raises(
            ValueError, match=r"unexpected tensor 'model\.layers\.3\.mlp\.donw_proj"
        ):
            load(running, {"model.layers.3.mlp.donw_proj.weight": bucket[name]}, size=1)
        assert answers(running, asked) == old
        load(running, right, size=40)
        assert answers(running, asked) == old


def test_a_quantized_model_takes_whole_reloads_only() -> None:
    path = QUANTIZED / "tiny-llada2-nvfp4"
    asked = list(mixed("llada2", 6))
    name = "model.norm.weight"
    with engine(path, 32, **TRAINER) as running:
        old = answers(running, asked)
        with pytest.raises(ValueError, match=rf"{name}.*quantized; use `reload_weights`"):
            load(running, {name: torch.zeros_like(tensors_of(path)[name])}, size=1)
        assert answers(running, asked) == old
        reload(running, tensors_of(path))
        assert answers(running, asked) == old


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_invented_weights_are_replaced(family: str, tmp_path: Path) -> None:
    """A trainer that sends all weights anyway starts the engine with ``--load-format dummy``."""
    path, length, _, _ = FAMILIES[family]
    asked = list(mixed(family, 6))
    with engine(path, length, **options_of(family)) as running:
        wanted = answers(running, asked)
    for give in (send, load):
        with engine(path, length, load_format="dummy", **options_of(family)) as running:
            assert answers(running, asked) != wanted
            give(running, tensors_of(path), size=40)
            assert answers(running, asked) == wanted


@pytest.mark.long
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
        driver = Driver(running)
        for number, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
            driver.add(str(number), prompt, asked)
        for _ in range(9):
            driver.step()
        running.llm.sleep(level=0, mode="keep")
        # The same, so that answers can be compared.
        send(running, tensors_of(path), size=11)
        running.llm.wake_up(tags=["scheduling"])
        ended = driver.finish()
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
