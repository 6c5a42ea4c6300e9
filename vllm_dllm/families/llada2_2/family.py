"""LLaDA2.2: its configuration, and the tokens that edit a canvas."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from vllm_dllm.decoding import EditTokens
from vllm_dllm.families.config_fields import Fields, hf_overrides, source_of
from vllm_dllm.families.llada2.family import BLOCK_ROUTED, FIELDS, LLaDA2
from vllm_dllm.ranges import SettingsError, shown

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EDITS = ("delete_token_id", "split_token_id")


class LLaDA22(LLaDA2):
    """LLaDA2.2-flash. Its ``config.json`` is LLaDA2's, with ``expert_capacity``."""

    architecture: ClassVar[str] = BLOCK_ROUTED
    algorithm: ClassVar[str] = "JointThresholdInDel"
    several_blocks: ClassVar[bool] = False
    fields: ClassVar[Fields] = replace(
        FIELDS,
        supported={
            name: FIELDS.supported[name]
            for name in FIELDS.supported.keys() - {"expert_capacity", *EDITS}
        }
        | {
            "score_function": (("sigmoid", None), "another score of experts than the sigmoid"),
            "moe_router_enable_expert_bias": ((True,), "a router without a bias"),
            "norm_topk_prob": ((True,), "weights of experts that do not add up to 1"),
        },
    )

    def configure(self, vllm_config: VllmConfig) -> None:
        """See `Family.configure`."""
        if vllm_config.parallel_config.data_parallel_size > 1:
            raise ValueError(
                "--data-parallel-size: the experts of LLaDA2.2 are chosen for the blocks of one "
                "rank's requests, and vLLM may mix the ranks' tokens before that; start "
                "independent servers, or use --tensor-parallel-size"
            )
        hf_config = vllm_config.model_config.hf_config
        overrides = hf_overrides(vllm_config.model_config)
        # Checkpoints still state groups of experts, which block routing replaces.
        hf_config.n_group = hf_config.topk_group = 1
        super().configure(vllm_config)
        hf_config.score_function = "sigmoid"
        capacity, least, most = (
            getattr(hf_config, name)
            for name in ("expert_capacity", "num_experts_per_tok", "num_experts")
        )
        if not least <= capacity <= most:
            raise SettingsError(
                f"{source_of('expert_capacity', overrides)}: expert_capacity={capacity} must be at "
                f"least num_experts_per_tok={least} and at most num_experts={most}"
            )

    def edit_tokens(self, vllm_config: VllmConfig) -> EditTokens:
        """See `Family.edit_tokens`; raises `SettingsError` unless ``config.json`` has both ids."""
        model = vllm_config.model_config
        overrides = hf_overrides(model)
        vocabulary, mask = model.get_vocab_size(), model.hf_config.mask_token_id
        found = [getattr(model.hf_config, name) for name in EDITS]
        for name, token in zip(EDITS, found, strict=True):
            source = source_of(name, overrides)
            if token is None:
                raise SettingsError(
                    f"{source}: {name} is missing; pass --hf-overrides '{{\"{name}\": ID}}' with "
                    "the id that the model was trained with"
                )
            if not 0 <= token < vocabulary:
                raise SettingsError(
                    f"{source}: {name}={shown(token)} must be in [0, vocab_size={vocabulary})"
                )
        delete, split = found
        if len({mask, delete, split}) < 3:
            raise SettingsError(
                f"{source_of(EDITS[0], overrides)}: mask_token_id={mask}, delete_token_id={delete} "
                f"and split_token_id={split} must be three different ids"
            )
        return EditTokens(mask, delete, split)
