"""Start-up checks of vLLM's configuration that hold for every diffusion model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The places in vLLM's configuration of arguments that are refused whenever they are set, and why.
_BY_TOKEN = "it is for models that are read token by token"
REFUSED = {
    "speculative_config": "a diffusion model already proposes whole blocks",
    "watermark_config": "a position does not know the tokens before it",
    "ec_transfer_config": "pictures are encoded where they are read",
    "scheduler_config.scheduler_cls": "block-diffusion models need their own scheduler",
    "model_config.enable_prompt_embeds": _BY_TOKEN,
    "model_config.enable_trace_replay": _BY_TOKEN,
    "model_config.logits_processors": _BY_TOKEN,
    "model_config.model_class_overrides": "another class does not read canvases",
    "model_config.use_fp64_gumbel": "tokens are drawn by operators that have no float64",
    "model_config.multimodal_config.enable_mm_embeds": "pictures are read, not their embeddings",
    "model_config.multimodal_config.mm_encoder_only": "nothing would answer",
    "aux_output_config.enable_return_routed_experts": (
        "a token is read several times, each time by other experts"
    ),
    "cache_config.kv_sharing_fast_prefill": "all positions of a canvas are read, and it skips some",
    "parallel_config.enable_batch_sharded_sampling": "ranks share canvases already",
    "parallel_config.enable_eplb": "not supported for diffusion models",
    "parallel_config.enable_dbo": "a batch of canvases cannot be cut",
    "parallel_config.ubatch_size": "a batch of canvases cannot be cut",
}


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise for every vLLM option that a diffusion model would otherwise get wrong or ignore."""
    for message, refused in _special_cases(vllm_config).items():
        if refused:
            raise ValueError(message)
    for path, reason in REFUSED.items():
        value: Any = vllm_config
        for name in path.split("."):  # a model without images has no configuration of them
            value = getattr(value, name, None)
        if value:
            raise ValueError(f"--{name.replace('_', '-')}: {reason}; remove it")
    if vllm_config.kv_transfer_config or vllm_config.cache_config.kv_offloading_size is not None:
        from vllm_dllm.startup.kv_transfer import check_kv_transfer

        check_kv_transfer(vllm_config)


def _special_cases(vllm_config: VllmConfig) -> dict[str, Any]:
    """The messages about options that have one of their own, and whether these are refused."""
    from vllm import envs
    from vllm.platforms import current_platform

    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    grammars = vllm_config.structured_outputs_config.backend
    return {
        "VLLM_USE_V2_MODEL_RUNNER=0: diffusion models need Model Runner V2; unset it": (
            envs.VLLM_USE_V2_MODEL_RUNNER is False
        ),
        "vLLM's CPU build lacks what Model Runner V2 needs: pip install vllm-cpu-v2 (and name "
        "vllm_cpu_v2 in VLLM_PLUGINS if that is set)": (
            not vllm_config.use_v2_model_runner and current_platform.is_cpu()
        ),
        "context parallelism: not supported for diffusion models; use --tensor-parallel-size": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
        ),
        f"--distributed-executor-backend ray: on the platform {current_platform.device_name} vLLM "
        "has no device for Ray's workers; set it to mp": (
            parallel.use_ray and not current_platform.ray_device_key
        ),
        "VLLM_BATCH_INVARIANT=1: the statistics and decoding algorithms of diffusion models add "
        "up in an order that depends on the batch; unset it": envs.VLLM_BATCH_INVARIANT,
        "VLLM_RAISE_ON_LOGIT_NANS=1: a request of a diffusion model whose logits are not finite "
        "ends with an error already, and the others go on; unset it": envs.VLLM_RAISE_ON_LOGIT_NANS,
        # vLLM refuses --data-parallel-external-lb for dense models, but not what it turns into.
        "--data-parallel-hybrid-lb: with one rank on a node each dense replica would have a server "
        "of its own and nothing to do with the others; start independent servers without "
        "--data-parallel-* options": (
            parallel.data_parallel_external_lb
            and parallel.data_parallel_size > 1
            and not model.is_moe
        ),
        "--enable-expert-parallel: on the CPU vLLM's experts cannot be spread over ranks, because "
        "their kernel takes no map of experts and would crash; remove it (each rank then has a "
        "part of every expert)": cannot_be_spread(vllm_config),
        f"--runner {model.runner_type}: a block-diffusion model fills canvases and has no "
        "pooler; serve it with --runner generate (or without --runner and --convert)": (
            model.runner_type != "generate"
        ),
        f"--max-logprobs {model.max_logprobs}: at most {MAX_LOGPROB_TOKEN_IDS} logprobs of a token "
        f"are kept until its canvas leaves; set it to {MAX_LOGPROB_TOKEN_IDS} or less": (
            not 0 <= model.max_logprobs <= MAX_LOGPROB_TOKEN_IDS
        ),
        f"--structured-outputs-config.backend {grammars}: grammar backends advance token by "
        "token, and canvases are not written so; remove it (constraints have an engine of their "
        "own)": grammars != "auto",
    }


def cannot_be_spread(vllm_config: VllmConfig) -> bool:
    """Whether experts would be spread over ranks that compute them with vLLM's kernel for the CPU.

    This kernel takes no map of experts, and would read past the end of its weights.
    """
    from vllm.platforms import current_platform

    parallel = vllm_config.parallel_config
    return (
        parallel.enable_expert_parallel
        and parallel.tensor_parallel_size * parallel.data_parallel_size > 1
        and vllm_config.model_config.is_moe
        and current_platform.is_cpu()
    )


def check_budget(vllm_config: VllmConfig, length: int) -> None:
    """Raise ValueError if a step cannot hold one whole canvas of `length` tokens."""
    scheduler = vllm_config.scheduler_config
    for name in (
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "long_prefill_token_threshold",
    ):
        value = getattr(scheduler, name)
        if value and value < length:
            raise ValueError(
                f"{name}={value} is below the {length} tokens of a canvas: none would fit into a "
                f"step; set --{name.replace('_', '-')} to at least {length}"
            )
