"""The family of masked models with a block-causal mask; a subclass names the architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm.config import DiffusionConfig
from vllm.logger import init_logger

from vllm_dllm.attention.routes import LayerShape
from vllm_dllm.decoding import Corruption
from vllm_dllm.families.base import Family
from vllm_dllm.families.config_fields import Fields, canvas_length, check_fields
from vllm_dllm.families.served import configure_engine
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.server import LENGTHS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler

logger = init_logger("vllm.dllm")


class BlockCausalFamily(Family):
    """A position sees its whole block and everything before it; canvases start as masks.

    The model class has `MaskedCanvasModel` among its bases. ``config.json`` states
    ``canvas_length`` (by which vLLM recognises a diffusion model) and ``mask_token_id``, or the
    tokenizer has a mask token, or the family knows them.

    Attributes:
        fields: the fields of ``config.json`` that the model knows; None checks no fields.
        block_length: L of checkpoints whose ``config.json`` states none; None if there is no such
            length, or the configuration class fills it in.
        mask_spellings: texts by which the mask is found if the tokenizer does not declare it.
        usual_mask_token: the mask id where neither ``config.json`` nor the tokenizer has one.
        samples: requests are sampled as ``generation_config.json`` recommends; otherwise they are
            greedy unless they ask for a temperature.
    """

    corruption: ClassVar[Corruption] = "mask"
    algorithm: ClassVar[str] = "LowConfidence"
    aligned: ClassVar[bool] = True
    fields: ClassVar[Fields | None] = None
    block_length: ClassVar[int | None] = None
    mask_spellings: ClassVar[tuple[str, ...]] = ("<|mask|>",)
    usual_mask_token: ClassVar[int | None] = None
    samples: ClassVar[bool] = False

    def complete(self, model_config: ModelConfig) -> None:
        """See `Family.complete`; `configure` settles the length, which options may change."""
        hf_config = model_config.hf_config
        if self.block_length is not None and getattr(hf_config, "canvas_length", None) is None:
            stated = (getattr(hf_config, name, None) for name in LENGTHS)
            lengths = (length for length in stated if isinstance(length, int) and length > 0)
            hf_config.canvas_length = next(lengths, self.block_length)

    def configure(self, vllm_config: VllmConfig) -> None:
        """See `Family.configure`."""
        model = vllm_config.model_config
        hf_config = model.hf_config
        length = canvas_length(vllm_config, getattr(hf_config, "canvas_length", None))
        window = model.get_sliding_window()
        if window is not None:
            raise SettingsError(
                f"config.json: sliding_window={window}: block-causal attention has no sliding "
                "window; serve contexts that fit into it with --disable-sliding-window"
            )
        hf_config.canvas_length = length
        hf_config.mask_token_id = self.find_mask_token(model)
        diffusion = vllm_config.diffusion_config or DiffusionConfig(canvas_length=length)
        vllm_config.diffusion_config, diffusion.canvas_length = diffusion, length
        if self.fields is not None:
            check_fields(model, self.fields.ignored)
        if self.aligned:
            align_context(model, length)
        configure_engine(vllm_config, self, [LayerShape(model.get_head_size())])
        # vLLM's own default is 1.0.
        reads_file = self.samples and model.generation_config != "vllm"
        recommended = model.try_get_generation_config() if reads_file else {}
        if "temperature" not in recommended:
            model.override_generation_config.setdefault("temperature", 0.0)

    def find_mask_token(self, model_config: ModelConfig) -> int:
        """The mask id: from ``config.json``, else the tokenizer's, else `usual_mask_token`.

        Raises ValueError if there is none, or it is not in the vocabulary.
        """
        from vllm.tokenizers import cached_tokenizer_from_config

        vocabulary = model_config.get_vocab_size()
        mask = getattr(model_config.hf_config, "mask_token_id", None)
        if mask is None and not model_config.skip_tokenizer_init:
            tokenizer = cached_tokenizer_from_config(model_config)
            ids = tokenizer.get_vocab()
            spelled = next((ids[text] for text in self.mask_spellings if text in ids), None)
            declared = getattr(tokenizer, "mask_token_id", None)
            mask = spelled if declared is None else declared
        mask = self.usual_mask_token if mask is None else mask
        if mask is None:
            raise ValueError(
                f"no mask token: config.json of {model_config.model} has no 'mask_token_id' and "
                f"its tokenizer no mask token ({', '.join(map(repr, self.mask_spellings))}). Pass "
                "--hf-overrides '{\"mask_token_id\": ID}'."
            )
        if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < vocabulary:
            raise ValueError(
                f"mask_token_id {mask!r} is not a token id in [0, {vocabulary}); correct "
                "config.json, or pass --hf-overrides '{\"mask_token_id\": ID}'"
            )
        return mask

    def scheduler(self) -> type[DiffusionScheduler]:
        """See `Family.scheduler`."""
        from vllm_dllm.families.block_causal.scheduler import BlockDiffusionScheduler

        return BlockDiffusionScheduler


def align_context(model_config: ModelConfig, length: int) -> None:
    """Round ``max_model_len`` down, or refuse it, because the context holds only whole blocks."""
    given = model_config.max_model_len
    if given < length:
        raise ValueError(
            f"max_model_len={given} is below the block length {length}; set --max-model-len to at "
            f"least {length}"
        )
    model_config.max_model_len = given - given % length
    if given % length:
        logger.warning(
            f"dllm: max_model_len {given} is not a multiple of the block length {length}; serving "
            f"{model_config.max_model_len}"
        )
