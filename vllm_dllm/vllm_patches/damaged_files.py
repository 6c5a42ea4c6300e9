"""The name of a damaged checkpoint file in the error that it causes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dllm.families.registry import served_architectures
from vllm_dllm.vllm_patches.wrapping import Decorator, wrap

SHARDS = "*.safetensors"


def apply() -> None:
    """Name the damaged file that keeps one of our checkpoints from being loaded."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.tokenizers import registry
    from vllm.transformers_utils import config

    # vLLM reads the shards' headers early for a model with a tied head, to count its parameters.
    headers = _naming_damage(lambda path: (path.parent, None), SHARDS)
    weights = _naming_damage(
        lambda _loader, _module, model_config: (model_config.model, model_config.revision),
        "*.index.json",
        SHARDS,
    )
    tokenizer = _naming_damage(lambda name, revision=None, **_: (name, revision), "*token*.json")
    wrap(config, "parse_safetensors_file_metadata", headers)
    wrap(DefaultModelLoader, "load_weights", weights)
    wrap(registry, "cached_get_tokenizer", tokenizer)


def _naming_damage(checkpoint: Callable[..., Any], *patterns: str) -> Decorator:
    """A decorator for a function that reads a checkpoint.

    Args:
        checkpoint: gives the checkpoint and its revision (or None) from the function's arguments.
        patterns: the names of the files that the function reads.
    """

    def decorator(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except Exception as error:
                from vllm_dllm.checkpoints.verify import name_damage

                place = checkpoint(*args, **kwargs)
                name_damage(error, place, patterns, served_architectures())
                raise

        return read

    return decorator
