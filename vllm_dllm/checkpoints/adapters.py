"""LoRA adapters: the layers that they may adapt. Adapters of other layers are refused by name.

vLLM compares only the last part of a name in an adapter with the names of layers, so an adapter of
a layer that the model does not have, or that vLLM does not adapt, would be served without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.lora.utils import is_in_target_modules
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer, WeightsMapper

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def build_for_adapters(model: Any, build: Callable[[], None], vllm_config: VllmConfig) -> None:
    """Build a `VerifiedWeights`, and choose the layers that adapters adapt before vLLM wraps them.

    It is built as for an engine without adapters: experts take none, and vLLM's kernels of experts
    that do are written in Triton. ``--lora-target-modules`` restricts the layers further.
    """
    config, vllm_config.lora_config = vllm_config.lora_config, None
    assert config is not None
    try:
        build()
    finally:
        vllm_config.lora_config = config
    language = ""
    if hasattr(model, "get_mm_mapping"):
        language = model.get_mm_mapping().language_model[0] + "."
    layers, missing = dict[str, list[str]](), list[str]()
    for name, module in model.named_modules():
        if isinstance(module, PPMissingLayer):
            missing.append(f"{name}.")
        elif name.startswith(language) and _takes_adapter(name, module, model.embedding_modules):
            layers[name] = model.fused_from(name)
    given, packed = config.target_modules, getattr(model, "packed_modules_mapping", {})
    config.target_modules = [name for name in layers if is_in_target_modules(name, given, packed)]
    mapper = getattr(model, "hf_to_vllm_mapper", None) or WeightsMapper()
    names = frozenset(part for parts in layers.values() for part in parts)
    model.hf_to_vllm_mapper = _LayerNames(**vars(mapper), layers=names, elsewhere=tuple(missing))


def _takes_adapter(name: str, module: Any, embeddings: Collection[str]) -> bool:
    if isinstance(module, VocabParallelEmbedding):
        return name.rpartition(".")[2] in embeddings
    return isinstance(module, LinearBase) and not isinstance(module, GateLinear)


@dataclass
class _LayerNames(WeightsMapper):
    """A model's mapping of names, which refuses tensors of adapters for layers that take none.

    Attributes:
        layers: the names of adapted layers, before they are fused.
        elsewhere: what the names of the layers of other pipeline stages begin with.
        first: for each name in an adapter of vLLM's, the one that was mapped to it.
    """

    layers: Collection[str] = frozenset()
    elsewhere: tuple[str, ...] = ()
    first: dict[str, str] = field(default_factory=dict)

    def get_rename_mapper(self) -> WeightsMapper:
        """The mapping for the names in one adapter; vLLM asks for it whenever it loads one."""
        return replace(super().get_rename_mapper(), first={})

    def map_name(self, key: str) -> str | None:
        """VLLM's name of a tensor; raises ValueError if its layer takes no adapter of its own."""
        name = super().map_name(key)
        module, is_adapter, _ = key.partition(".lora_")
        if name is None or not is_adapter:
            return name
        layer = name.partition(".lora_")[0]
        if layer not in self.layers and not layer.startswith(self.elsewhere):
            reason = (
                "experts take no adapter" if ".experts" in module else "no layer that takes one"
            )
            raise ValueError(
                f"the adapter has tensors for {module!r}: {reason}; merge the adapter into the "
                "checkpoint, or train one of the attention's and dense layers only"
            )
        first = self.first.setdefault(name, key).partition(".lora_")[0]
        if first != module:
            raise ValueError(
                f"the adapter has tensors for {first!r} and {module!r}, which are one layer here; "
                "merge it into the checkpoint, or train an adapter of one of them"
            )
        return name
