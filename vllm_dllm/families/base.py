"""The interface of a model family: everything that differs from one kind of model to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_dllm.decoding import Corruption
from vllm_dllm.decoding.base import Beside, DrawConfidence, EditTokens

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler

    from vllm_dllm.attention.metadata import AttentionRule
    from vllm_dllm.engine.slots import SlotState
    from vllm_dllm.settings.resolution import Served


class Family(ABC):
    """One model family. A process has a single instance, which holds no request state.

    Attributes:
        architecture: the name in ``architectures`` of ``config.json``.
        model_class: ``module:Class`` of the model, which vLLM imports when it loads one. Families
            of this package leave it out, see `registry.model_class`.
        corruption: what fills fresh canvases: masks or uniform noise.
        algorithm: the decoding algorithm that the model's authors use, with its preset if any.
        aligned: the mask is block-causal: canvases begin at absolute multiples of L, and a denoise
            pass over a final canvas counts as a commit, because the model reads both with the same
            mask and input. Otherwise the first canvas begins after the prompt, and a commit is
            causal.
        shifted: position i is read at row i - 1, as causal models are. A canvas then begins with a
            decided token: a prompt token, or the likeliest one after the last row of the commit
            before. Needs masks.
        draw_confidence: what a drawn token's confidence is, whatever `Algorithm.own_confidence`
            says; None if that decides. Needs masks.
        usual: settings for which the model's authors have other defaults than the algorithm, by its
            name.
        end_tokens: ids that end every answer, also where the checkpoint does not say so.
        self_conditioned: every running request keeps the last prediction of its canvas, so the
            default of ``max_num_seqs`` is lower.
        verifies: row i of a causal commit predicts the token at position i + 1, so that an
            algorithm may verify a canvas with it.
        several_blocks: a canvas may hold several blocks, see `decoding.blocks`. Needs masks,
            `aligned`, and rows that depend on each other by attention alone.
        one_stage: why the model cannot have pipeline stages; "" if it can.
        excludes: what requests to the model cannot ask for; they are refused by name.
    """

    architecture: ClassVar[str]
    model_class: ClassVar[str]
    corruption: ClassVar[Corruption]
    algorithm: ClassVar[str]
    aligned: ClassVar[bool]
    shifted: ClassVar[bool] = False
    draw_confidence: ClassVar[DrawConfidence | None] = None
    usual: ClassVar[Mapping[str, Mapping[str, float]]] = MappingProxyType({})
    end_tokens: ClassVar[tuple[int, ...]] = ()
    self_conditioned: ClassVar[bool] = False
    verifies: ClassVar[bool] = False
    several_blocks: ClassVar[bool] = False
    one_stage: ClassVar[str] = ""
    excludes: ClassVar[frozenset[Beside]] = frozenset()

    def complete(self, model_config: ModelConfig) -> None:
        """Add to a checkpoint's configuration what its ``config.json`` leaves out.

        vLLM calls this before it asks whether the configuration has ``canvas_length`` and so is of
        a diffusion model. Raises ValueError if the checkpoint cannot be served.
        """
        return

    @abstractmethod
    def configure(self, vllm_config: VllmConfig) -> None:
        """Complete vLLM's configuration for the model; ends with `served.configure_engine`.

        vLLM calls this once for each engine configuration, before anything is allocated. For masked
        models it also sets ``hf_config.mask_token_id``. Raises ValueError, which names an option
        that cannot work and the remedy.
        """

    def checkpoint_settings(self, generation_config: Mapping[str, Any]) -> Mapping[str, float]:
        """The decoding settings in the generation config, by name; other fields are ignored.

        Raises `SettingsError` if a field is missing or out of range.
        """
        return generation_config

    def edit_tokens(self, vllm_config: VllmConfig) -> EditTokens | None:
        """The ids with which the model changes the layout of a canvas; None if it has none."""
        return None

    def attention(self, served: Served, slots: SlotState, own_backend: bool) -> AttentionRule:
        """The rule that says which keys a query sees, for our own backend or for vLLM's."""
        if self.aligned:
            from vllm_dllm.families.block_causal import attention as block_causal

            if own_backend:
                return block_causal.block_causal_rules(slots)
            blocks = served.window_length // served.length
            return block_causal.BlockCausal(served.length, slots.device, len(slots.phase), blocks)
        from vllm_dllm.families.anchored import attention as anchored

        if own_backend:
            return anchored.causal_unless_denoised_rules(slots, served.settings.window)
        return anchored.CausalUnlessDenoised(slots)

    def embeddings(self, state: Any) -> Any:
        """The input embeddings of vLLM's model state; None for a model that reads token ids."""
        return None

    @abstractmethod
    def scheduler(self) -> type[DiffusionScheduler]:
        """The scheduler's class, to which vLLM's asynchronous one is added if need be."""
