"""What the command ``vllm-dllm`` reports about an installation and about a model."""

from __future__ import annotations

from typing import Any

from vllm_dllm.vllm_patches.registration import is_ours


def kernel_summary() -> str:
    """The kinds of this package's kernels that can be chosen here, as text."""
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        return "torch (no Triton here: dllm.kernels=triton and attention CUSTOM are refused)"
    return "torch, triton; attention CUSTOM"


def explain(model: str, options: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The decoding settings that a server for a model would have.

    Args:
        model: name or path of the model.
        options: options of vLLM's engine, by name.

    Returns:
        For each setting its name, its value and where the value comes from.

    Raises:
        ValueError: the model is not ours, or a setting is refused.
    """
    from vllm.engine.arg_utils import EngineArgs

    from vllm_dllm.families.served import length_source

    # With one request at a time, because whether memory suffices for more does not matter here.
    args = EngineArgs(model=model, max_num_seqs=1, **options)
    config = args.create_engine_config()
    if not is_ours(config.model_config):
        raise ValueError(f"{model} is no model of this package")
    return config.model_config.dllm.explained(length_source(config, args.diffusion_config))


def platform_summary() -> tuple[str, str | None]:
    """The platform that vLLM runs on, as text, and why it cannot serve (None if it can)."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if current_platform.is_unspecified():
        return "none", "vLLM found no platform (no GPU, and not a CPU build)"
    name = f"{current_platform.device_type} ({current_platform.get_device_name()})"
    if not HAS_TRITON and not current_platform.is_cpu():
        return name, "Model Runner V2 needs Triton, which vLLM could not use here"
    return name, None
