"""LoRA adapters: the layers that they may adapt. Adapters of other layers are refused by name.

vLLM compares the last part of a name in an adapter with the names of all layers. An adapter of a
layer that the model does not have, or that vLLM does not adapt, would be served without it. Here
the whole name counts.

Experts take no adapter, so vLLM may choose their kernels as if there were none: those that take one
are written in Triton. Routers and layers that vLLM leaves to PyTorch take none either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.lora.utils import is_in_target_modules
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer, WeightsMapper

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@contextmanager
def experts_without_adapters(vllm_config: VllmConfig) -> Iterator[None]:
    """A context in which layers are built as in an engine that serves no adapters."""
    lora, vllm_config.lora_config = vllm_config.lora_config, None
    try:
        yield
    finally:
        vllm_config.lora_config = lora


def choose_layers(model: Any, vllm_config: VllmConfig) -> None:
    """Choose the layers of a model that adapters adapt, before vLLM wraps them.

    Args:
        model: as it was built; has `VerifiedWeights` among its bases.
        vllm_config: ``--lora-target-modules`` restricts the layers further.
    """
    language = ""
    if hasattr(model, "get_mm_mapping"):
        language = model.get_mm_mapping().language_model[0] + "."
    layers, missing = dict[str, list[str]](), list[str]()
    for name, module in model.named_modules():
        if isinstance(module, PPMissingLayer):
            missing.append(f"{name}.")
        elif name.startswith(language) and _takes_adapter(name, module, model.embedding_modules):
            layers[name] = model.fused_from(name)
    config = vllm_config.lora_config
    assert config is not None
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
    """A model's mapping of names, which knows the names of adapted layers.

    Attributes:
        layers: vLLM's names of the layers, before they are fused.
        elsewhere: what the names of the layers of other pipeline stages begin with.
    """

    layers: Collection[str] = frozenset()
    elsewhere: tuple[str, ...] = ()

    def get_rename_mapper(self) -> WeightsMapper:
        """The mapping for the names in one adapter; vLLM asks for it whenever it loads one."""
        renamed = WeightsMapper(
            orig_to_new_renaming=self.orig_to_new_renaming,
            orig_to_new_regex=self.orig_to_new_regex,
            orig_to_new_substr=self.orig_to_new_substr,
            orig_to_new_prefix=self.orig_to_new_prefix,
            orig_to_new_suffix=self.orig_to_new_suffix,
        ).get_rename_mapper()
        return _NamesInAdapter(**vars(renamed), model=self)


@dataclass
class _NamesInAdapter(WeightsMapper):
    """Maps the names of an adapter's tensors, and refuses those of layers that take none.

    Attributes:
        model: the names of the model's layers.
        first: for each name of vLLM's, the one that was mapped to it.
    """

    model: _LayerNames = field(default_factory=_LayerNames)
    first: dict[str, str] = field(default_factory=dict)

    def map_name(self, key: str) -> str | None:
        """VLLM's name of a tensor.

        Raises:
            ValueError: its layer takes no adapter, or it is the adapter of two layers whose weights
                are shared.
        """
        name = super().map_name(key)
        module, is_adapter, _ = key.partition(".lora_")
        if name is None or not is_adapter:
            return name
        layer = name.partition(".lora_")[0]
        if layer not in self.model.layers and not layer.startswith(self.model.elsewhere):
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
