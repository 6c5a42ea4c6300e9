"""The fields of ``config.json``: read as stated, refused, known to be inert, or named in a warning.

Silently ignoring a field may change a model's answers.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from transformers import GenerationConfig, PretrainedConfig
from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_dllm.ranges import SettingsError, listed, shown
from vllm_dllm.settings.server import DEFAULT_BLOCK_LENGTH, LENGTH, LENGTHS

logger = init_logger("vllm.dllm")

# For every model: transformers' own attributes, options of loaders, and generation settings in
# older configurations.
_HOUSEKEEPING = (
    frozenset(vars(PretrainedConfig()))
    | frozenset(GenerationConfig().to_dict())
    | {"model_type", "auto_map", "torch_dtype", "tokenizer_class", "quantization_config"}
    | {"compression_config", "attn_implementation", "_attn_implementation", "_commit_hash"}
    | {"tie_word_embeddings", "tie_encoder_decoder", "is_decoder", "is_encoder_decoder", "prefix"}
    | {"add_cross_attention", "cross_attention_hidden_size", "pruned_heads", "torchscript"}
    | {"use_bfloat16", "tf_legacy_loss", "finetuning_task", "task_specific_params"}
    | {"output_attentions", "sep_token_id", "bad_words_ids", "unsloth_version", "name_or_path"}
)


# `strict`, which subclasses have, needs annotations that are evaluated.
@dataclass
class MaskedFields:
    """The fields that a masked model has beside those of its backbone's configuration class.

    Comes before that class among the bases. It is not registered itself under a second
    ``model_type``, because that would change its name in the whole process.

    Attributes:
        canvas_length: the block length, under the name by which vLLM recognises a diffusion model.
        usual_length: the block length of files that state none; None if they are not served.
    """

    usual_length: ClassVar[int | None] = DEFAULT_BLOCK_LENGTH

    mask_token_id: int | None = None
    block_length: int | None = None
    block_size: int | None = None
    bd_size: int | None = None
    canvas_length: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # Files name the attention used in training here, and transformers would select it.
        kwargs.pop("attn_implementation", None)
        stated = self.canvas_length or self.block_length or self.block_size or self.bd_size
        self.canvas_length = stated or self.usual_length
        super().__post_init__(**kwargs)  # type: ignore[misc]


@dataclass(frozen=True)
class Fields:
    """The fields of ``config.json``, or of one object in it, that a model knows.

    Attributes:
        config_class: the configuration class, whose fields are read.
        also: fields that are read by others, or that do not matter to the model.
        supported: for fields that would ask for something else, the values that ask for nothing,
            and what others ask for.
        parts: what fields that hold objects know, by name.
    """

    config_class: type
    also: frozenset[str] = frozenset()
    supported: Mapping[str, tuple[Collection[Any], str]] = field(default_factory=dict)
    parts: Mapping[str, "Fields"] = field(default_factory=dict)

    def ignored(
        self, stated: Mapping[str, Any], overrides: Mapping[str, Any], prefix: str = ""
    ) -> list[str]:
        """The unknown fields of an object in ``config.json``, in the file's order.

        Args:
            stated: the object, with ``--hf-overrides``.
            overrides: the whole value of ``--hf-overrides``.
            prefix: the fields that contain the object (``text_config.``).

        Raises:
            SettingsError: a field asks for something that is not supported.
        """
        known = {each.name for each in fields(self.config_class)} | self.also | _HOUSEKEEPING
        found = [prefix + name for name in stated if name not in known | self.supported.keys()]
        for name, value in stated.items():
            taken, wanted = self.supported.get(name, ((value,), ""))
            if not any(value is one or (type(value), value) == (type(one), one) for one in taken):
                raise SettingsError(
                    f"{source_of(prefix + name, overrides)}: {prefix}{name}={shown(value)} asks "
                    f"for {wanted}, which is not supported"
                )
            if name in self.parts and isinstance(value, Mapping):
                found += self.parts[name].ignored(value, overrides, f"{prefix}{name}.")
        return found


def hf_overrides(model_config: ModelConfig) -> dict[str, Any]:
    """The value of ``--hf-overrides``; empty if it is a function, which only Python can pass."""
    return model_config.hf_overrides if isinstance(model_config.hf_overrides, dict) else {}


def stated_fields(model_config: ModelConfig) -> dict[str, Any]:
    """The fields of ``config.json`` as written, overridden by ``--hf-overrides``."""
    stated = get_hf_file_to_dict("config.json", model_config.model, model_config.revision) or {}
    return merged(stated, hf_overrides(model_config))


def merged(stated: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Override as vLLM's ``--hf-overrides`` does: merge objects and replace everything else."""
    found = dict(stated)
    for name, value in overrides.items():
        below = found.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        found[name] = merged(below, value) if both else value  # type: ignore[arg-type]
    return found


def source_of(name: str, overrides: Mapping[str, Any]) -> str:
    """``config.json`` or ``--hf-overrides``, for a field such as ``text_config.x``."""
    found: Any = overrides
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return "config.json"
        found = found[part]
    return "--hf-overrides"


def canvas_length(vllm_config: VllmConfig, usual: int | None = None) -> int:
    """L as given by ``--diffusion-config``, else by the checkpoint under any name, else `usual`.

    Raises `SettingsError` if there is none, or the checkpoint states two, or one out of range.
    """
    diffusion, model = vllm_config.diffusion_config, vllm_config.model_config
    if diffusion is not None and diffusion.canvas_length:
        return diffusion.canvas_length
    sources = {"--hf-overrides": hf_overrides(model), "config.json": stated_fields(model)}
    for source, stated in sources.items():
        stated = (stated.get("text_config") or {}) | stated
        given = {name: stated[name] for name in LENGTHS if stated.get(name) is not None}
        for name, length in given.items():
            LENGTH.check(f"{source}: {name}", length)
        if len(set(given.values())) > 1:
            names = " contradicts ".join(f"{name}={length}" for name, length in given.items())
            raise SettingsError(
                f"{source}: {names}; give both the same, or pass --diffusion-config "
                "'{\"canvas_length\": L}'"
            )
        if given:
            return next(iter(given.values()))
    if usual is None:
        raise SettingsError(
            f"config.json of {model.model} has no 'canvas_length'; pass --diffusion-config "
            "'{\"canvas_length\": L}' with the length that it was trained with"
        )
    return usual


def check_fields(
    model_config: ModelConfig,
    ignored: Callable[[Mapping[str, Any], Mapping[str, Any]], list[str]],
) -> None:
    """Warn about each field that is ignored; `ignored` is as `Fields.ignored`, and may raise."""
    overrides, by_source = hf_overrides(model_config), defaultdict[str, list[str]](list)
    for name in ignored(stated_fields(model_config), overrides):
        by_source[source_of(name, overrides)].append(name)
    for source, names in by_source.items():
        logger.warning(
            f"dllm: {source} of {model_config.model}: fields without effect: {listed(names)}; if "
            "the model needs them, its answers are wrong (settings of decoding belong in "
            "--additional-config)"
        )
