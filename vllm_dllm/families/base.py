"""What a model family brings: the contract between a kind of model and everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_dllm.decoding import Corruption

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler

    from vllm_dllm.attention.metadata import AttentionRule
    from vllm_dllm.settings.resolution import Served
    from vllm_dllm.worker.logprobs import LogprobReports
    from vllm_dllm.worker.readout.choice import ReadoutSettings
    from vllm_dllm.worker.readout.contract import Readout
    from vllm_dllm.worker.slots import SlotState


class Family(ABC):
    """One model family. There is one object of it in a process; it holds no request's state.

    Attributes:
        architecture: what ``config.json`` names in ``architectures``.
        model_class: ``module:Class`` of the model, which vLLM imports when it loads one.
        corruption: what fresh canvases are full of, masks or uniform noise.
        algorithm: the decoding algorithm of its authors.
        aligned: canvases begin at absolute multiples of L; otherwise behind the prompt.
        commits_in_place: a denoise pass over a final canvas is as good as a commit, because the
            model reads both with the same mask and the same input.
    """

    architecture: ClassVar[str]
    model_class: ClassVar[str]
    corruption: ClassVar[Corruption]
    algorithm: ClassVar[str]
    aligned: ClassVar[bool]
    commits_in_place: ClassVar[bool]

    @property
    def left_to_vllm(self) -> bool:
        """Whether vLLM's own class serves the model in this environment."""
        return False

    def register(self) -> None:  # noqa: B027
        """Tell transformers of a configuration class, where it does not know the model's."""

    @abstractmethod
    def configure(self, vllm_config: VllmConfig) -> None:
        """Fill in what the model needs of vLLM's configuration; refuse what cannot work.

        vLLM calls this once for each engine configuration, before anything is allocated. Sets
        ``model_config.dllm``.

        Raises:
            ValueError: with the setting's name and the remedy.
        """

    @abstractmethod
    def checkpoint_settings(self, generation_config: Mapping[str, Any]) -> Mapping[str, float]:
        """What ``generation_config.json`` says about decoding, by setting.

        Raises:
            SettingsError: a field is missing or out of range.
        """

    def mask_token(self, vllm_config: VllmConfig) -> int | None:
        """What fresh canvases are full of; None for uniform noise."""
        return None

    @abstractmethod
    def attention(self, served: Served, slots: SlotState, own_backend: bool) -> AttentionRule:
        """How queries see keys; with `own_backend`, as rules for this package's backend."""

    @abstractmethod
    def readout(
        self,
        model: nn.Module,
        slots: SlotState,
        reports: LogprobReports,
        settings: ReadoutSettings,
    ) -> Readout:
        """The way from hidden states to what a decoding algorithm reads."""

    def embeddings(self, state: Any) -> Any:
        """The input embeddings, for vLLM's model state; None where token ids are the input."""
        return None

    @abstractmethod
    def scheduler(self, asynchronous: bool) -> type[DiffusionScheduler]:
        """The scheduler's class."""
