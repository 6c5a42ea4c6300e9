"""openPangu-R-7B-Diffusion: Llama that reads its prompt causally and fills masked blocks of 32.

Its ``config.json`` is that of the autoregressive openPangu-Embedded, which vLLM serves. Diffusion
is a choice: ``--hf-overrides '{"mask_token_id": 45830}'``.

Source: ``inference/generation_utils.py`` of openpangu/openPangu-R-7B-Diffusion.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from vllm_dllm.decoding.base import ALL_BESIDE, Beside, DrawConfidence
from vllm_dllm.families.block_causal.family import BlockCausalFamily
from vllm_dllm.families.config_fields import Fields, MaskedFields

if TYPE_CHECKING:
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler

# The architecture that checkpoints state, and the one under which they are served with a mask.
CAUSAL, DIFFUSION = "PanguEmbeddedForCausalLM", "OpenPanguDiffusionForCausalLM"


@strict
class PanguEmbeddedConfig(MaskedFields, LlamaConfig):
    """``model_type: PanguEmbedded``, with the authors' defaults; vLLM's class reads it, too.

    Attributes:
        bias: whether the projections of the attention have one.
    """

    model_type = "PanguEmbedded"

    architectures: list[str] | None = None
    vocab_size: int = 153376
    intermediate_size: int = 12800
    num_hidden_layers: int = 34
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-5
    default_theta: ClassVar[float] = 1.6e7
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 45892
    attention_bias: bool = False
    bias: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.choose()

    def update(self, config_dict: dict[str, Any]) -> None:
        """Replace these fields, as ``--hf-overrides`` asks for."""
        super().update(config_dict)
        self.choose()

    def choose(self) -> None:
        """Diffusion if there is a mask, and what vLLM makes of the model otherwise."""
        if self.mask_token_id is None:
            self.canvas_length = None
            return
        stated = self.canvas_length or self.block_length or self.block_size or self.bd_size
        self.canvas_length = stated or self.usual_length
        self.attention_bias = self.attention_bias or self.bias
        if self.architectures == [CAUSAL]:
            self.architectures = [DIFFUSION]


FIELDS = Fields(
    PanguEmbeddedConfig,
    frozenset({"rope_theta", "rope_scaling"}),
    # What vLLM's Llama would ignore, or do in a way that does not fit a canvas.
    {
        "is_causal": ((None, True), "attention without a cache"),
        "qkv_bias": ((None,), "other biases than in all of the attention's projections"),
        "sandwich_norm": ((None, False), "norms after attention and MLP"),
        "n_routed_experts": ((None,), "experts"),
        "param_sink_number": ((None, 0), "attention to sinks"),
        "layer_types": ((None,), "layers of several types"),
        "hidden_act": (("silu",), "another activation than SiLU"),
    },
)


class OpenPangu(BlockCausalFamily):
    """openPangu-R-7B-Diffusion.

    top-k is applied before top-p, as by vLLM; the authors' code does it the other way around. Their
    ``entropy`` is `EntropyBounded` with a bound of 0, and their ``topk_margin`` is left out.
    """

    architecture: ClassVar[str] = DIFFUSION
    algorithm: ClassVar[str] = "SubBlocks"
    aligned: ClassVar[bool] = False
    shifted: ClassVar[bool] = True
    draw_confidence: ClassVar[DrawConfidence | None] = "filtered"
    # One part, the whole block.
    usual: ClassVar[Mapping[str, Mapping[str, float]]] = MappingProxyType(
        {"SubBlocks": {"sub_block_length": 32}}
    )
    one_stage: ClassVar[str] = "it is not supported for openPangu-R"
    # What these change or report would not hold for the boundary token, which no step decides; and
    # a canvas that has been output in part would not end with the context.
    excludes: ClassVar[frozenset[Beside]] = ALL_BESIDE
    fields: ClassVar[Fields] = FIELDS

    def scheduler(self) -> "type[DiffusionScheduler]":
        """See `Family.scheduler`."""
        from vllm_dllm.families.anchored.scheduler import CanvasScheduler

        return CanvasScheduler
