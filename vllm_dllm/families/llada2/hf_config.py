"""The configuration class of LLaDA2, so that no ``trust_remote_code`` is needed.

It is separate from the model because it is imported in every process (and pickled to workers),
while the model class is imported only where the model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from transformers import PretrainedConfig

from vllm_dllm.checkpoints.config_fields import LLADA2_INERT, LLADA2_ONLY, check_only
from vllm_dllm.ranges import Range, SettingsError, shown
from vllm_dllm.settings.request import LENGTH
from vllm_dllm.settings.server import DEFAULT_BLOCK_LENGTH

_COUNT = Range(least=1, most=1 << 16, whole=True)
_SIZE = Range(least=1, most=1 << 24, whole=True)
_COUNT_OR_ZERO = Range(most=1 << 16, whole=True)
_SHARE = Range(above=True, most=1.0)
_RANGES = {
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": _COUNT,
    "num_attention_heads": _COUNT,
    "num_key_value_heads": _COUNT,
    "head_dim": _COUNT,
    "rms_norm_eps": _SHARE,
    "max_position_embeddings": Range(least=1, whole=True),
    "rope_theta": Range(above=True),
    "partial_rotary_factor": _SHARE,
    "rotary_dim": _COUNT,
    "num_experts": _COUNT,
    "num_experts_per_tok": _COUNT,
    "num_shared_experts": _COUNT_OR_ZERO,
    "moe_intermediate_size": _SIZE,
    "first_k_dense_replace": _COUNT_OR_ZERO,
    "n_group": _COUNT,
    "topk_group": _COUNT,
    "routed_scaling_factor": Range(above=True),
    "embedding_dropout": Range(most=1.0),
    "mask_token_id": Range(most=1 << 24, whole=True),
    "block_length": LENGTH,
    "block_size": LENGTH,
    "canvas_length": LENGTH,
    "moe_shared_expert_intermediate_size": _SIZE,
}
# Fields that may be null: the value comes from elsewhere, or there are no groups.
_OPTIONAL = frozenset(
    {"head_dim", "rotary_dim", "n_group", "topk_group"}
    | {"mask_token_id", "block_length", "block_size", "canvas_length"}
    | {"moe_shared_expert_intermediate_size"}
)
_FLAGS = frozenset(
    {"use_qk_norm", "use_bias", "use_qkv_bias", "norm_head", "norm_topk_prob"}
    | {"moe_router_enable_expert_bias", "tie_word_embeddings"}
)
_CHOICES = {
    "score_function": ("sigmoid", "softmax", None),
    "router_dtype": ("fp32", "bf16", None),
}
# Every field that has a meaning here or is known to have none.
KNOWN_FIELDS = (
    frozenset(_RANGES)
    | _FLAGS
    | frozenset(_CHOICES)
    | frozenset(LLADA2_ONLY)
    | LLADA2_INERT
    # Read by the model's class and by vLLM.
    | {"hidden_act", "rope_scaling", "rope_parameters"}
)


def check_field(name: str, value: object) -> None:
    """Raise `SettingsError` for a field of ``config.json`` that cannot be honoured.

    The field is null, out of range, or asks for something that this package does not support.
    """
    stated = f"config.json: {name}"
    check_only(name, value, LLADA2_ONLY)
    if name in _RANGES and not (value is None and name in _OPTIONAL):
        _RANGES[name].check(stated, value)
    if name in _FLAGS and not isinstance(value, bool):
        raise SettingsError(f"{stated} must be true or false, got {shown(value)}")
    if name in _CHOICES and value not in _CHOICES[name]:
        raise SettingsError(f"{stated} must be one of {_CHOICES[name]}, got {shown(value)}")


def _derived(value: int, formula: str) -> int:
    _COUNT.check(f"config.json: {formula}", value)
    return value


def check_together(config: LLaDA2MoeConfig) -> None:
    """Raise `SettingsError`, naming all of them, for fields that contradict each other."""
    for holds, sentence in chain(_attention_rules(config), _expert_rules(config)):
        if not holds:
            raise SettingsError(f"config.json: {sentence}")


def fill_in(config: Any) -> None:
    """Fill in fields that are null and follow from the others."""
    heads, factor = config.num_attention_heads, config.partial_rotary_factor
    if config.head_dim is None:
        config.head_dim = _derived(
            0 if config.hidden_size % heads else config.hidden_size // heads,
            f"head_dim = hidden_size={config.hidden_size} / num_attention_heads={heads}",
        )
    if config.rotary_dim is None:
        config.rotary_dim = _derived(
            int(config.head_dim * factor),
            f"rotary_dim = {_head_dim(config)} * partial_rotary_factor={factor}",
        )
    if config.n_group is None and config.topk_group is None:
        # One group selects the same experts, and every platform's router supports it.
        config.n_group = config.topk_group = 1


def _head_dim(c: Any) -> str:
    """The value, and its origin unless it was stated directly."""
    derived = c.head_dim * c.num_attention_heads == c.hidden_size
    heads = f" (hidden_size={c.hidden_size} / num_attention_heads={c.num_attention_heads})"
    return f"head_dim={c.head_dim}{heads if derived else ''}"


def _attention_rules(c: Any) -> Iterator[tuple[bool, str]]:
    yield (
        c.num_attention_heads % c.num_key_value_heads == 0,
        f"num_attention_heads={c.num_attention_heads} must be a multiple of "
        f"num_key_value_heads={c.num_key_value_heads}",
    )
    part = f"{_head_dim(c)} * partial_rotary_factor={c.partial_rotary_factor}"
    yield (
        c.rotary_dim % 2 == 0 and c.rotary_dim <= c.head_dim,
        f"rotary_dim={c.rotary_dim} ({part}) must be even and at most head_dim",
    )
    yield (
        abs(c.rotary_dim - c.head_dim * c.partial_rotary_factor) < 1,
        f"rotary_dim={c.rotary_dim} contradicts {part}; give one, or both alike",
    )
    size = getattr(c, "block_size", None)  # of an override: a file's is read as block_length
    yield (
        size in (None, c.canvas_length),
        f"block_size={size} contradicts the block length {c.canvas_length}; state block_length and "
        "canvas_length instead",
    )
    ends = getattr(c, "eos_token_id", None)
    each = ends if isinstance(ends, list) else [] if ends is None else [ends]
    yield (
        # Otherwise the first request with `min_tokens` would index past the end of the logits.
        all(isinstance(end, int) and 0 <= end < c.vocab_size for end in each),
        f"eos_token_id={shown(ends)} must be in [0, vocab_size={c.vocab_size})",
    )


def _expert_rules(c: Any) -> Iterator[tuple[bool, str]]:
    groups, chosen = c.n_group, c.topk_group
    yield (
        None not in (groups, chosen),
        f"n_group={groups} and topk_group={chosen}: give both or neither",
    )
    size, biased = c.num_experts // groups, c.moe_router_enable_expert_bias
    yield (
        c.num_experts % groups == 0 and (size >= 2 or not biased),
        f"num_experts={c.num_experts} must be a multiple of n_group={groups}, and at least twice "
        "that: a group is judged by its two best",
    )
    shared = getattr(c, "moe_shared_expert_intermediate_size", None)
    yield (
        shared in (None, c.moe_intermediate_size),
        f"moe_shared_expert_intermediate_size={shared} is not supported where it differs from "
        f"moe_intermediate_size={c.moe_intermediate_size}",
    )
    yield chosen <= groups, f"topk_group={chosen} must be at most n_group={groups}"
    yield (
        c.num_experts_per_tok <= chosen * size,
        f"num_experts_per_tok={c.num_experts_per_tok} must be at most {chosen * size}, which is "
        f"topk_group={chosen} groups of num_experts={c.num_experts} / n_group={groups}",
    )
    yield (
        c.score_function is None or (c.score_function == "sigmoid") == biased,
        f"score_function={c.score_function} contradicts moe_router_enable_expert_bias={biased}: "
        "sigmoid has a bias, softmax none",
    )


class LLaDA2MoeConfig(PretrainedConfig):
    """``model_type: llada2_moe``, with the defaults that real checkpoints leave out.

    The published ``config.json`` files carry neither the mask id nor the block length, and some
    lack ``use_qk_norm``, which the authors' code applies regardless. The mask id is filled in from
    the tokenizer when the engine starts; ``canvas_length`` is the name by which vLLM recognises a
    diffusion model. Fields are checked whenever they are set, including by ``--hf-overrides``.

    Raises:
        SettingsError: a field is out of range or contradicts another; names it.
    """

    model_type = "llada2_moe"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            check_field(name, value)  # here, because below a 0 would count as unset
        self.vocab_size = kwargs.pop("vocab_size", 157184)
        self.hidden_size = kwargs.pop("hidden_size", 2048)
        self.intermediate_size = kwargs.pop("intermediate_size", 5120)
        self.num_hidden_layers = kwargs.pop("num_hidden_layers", 20)
        self.num_attention_heads = kwargs.pop("num_attention_heads", 16)
        heads = self.num_attention_heads
        self.num_key_value_heads = kwargs.pop("num_key_value_heads", min(4, heads))
        self.head_dim = kwargs.pop("head_dim", None)
        self.hidden_act = kwargs.pop("hidden_act", "silu")
        self.rms_norm_eps = kwargs.pop("rms_norm_eps", 1e-6)
        self.max_position_embeddings = kwargs.pop("max_position_embeddings", 32768)
        self._init_attention(kwargs)
        self._init_experts(kwargs)
        self.embedding_dropout = kwargs.pop("embedding_dropout", 0.0)
        self.norm_head = kwargs.pop("norm_head", False)
        self.mask_token_id = kwargs.pop("mask_token_id", None)
        self._init_length(kwargs)
        kwargs.setdefault("tie_word_embeddings", False)
        fill_in(self)
        super().__init__(**kwargs)
        check_together(self)

    def update(self, config_dict: dict[str, Any]) -> None:
        """Apply ``--hf-overrides``, and check the fields together once all of them are set."""
        try:
            super().update(config_dict)
            fill_in(self)
            check_together(self)
        except SettingsError as error:  # The file alone was right.
            raise SettingsError(str(error).replace("config.json:", "--hf-overrides:", 1)) from None

    def __setattr__(self, key: str, value: Any) -> None:
        check_field(key, value)
        super().__setattr__(key, value)

    def _init_length(self, kwargs: dict[str, Any]) -> None:
        """L, by any of its names; LLaDA2.2 calls it ``block_size``."""
        names = ("block_length", "canvas_length", "block_size")
        given = {name: kwargs.pop(name, None) for name in names}
        given = {name: length for name, length in given.items() if length is not None}
        if len(set(given.values())) > 1:
            stated = " and ".join(f"{name}={length}" for name, length in given.items())
            raise SettingsError(
                f"config.json: {stated} are {('two', 'three')[len(given) - 2]} names for one number"
            )
        self.block_length = given.get("block_length", given.get("block_size"))
        self.canvas_length = next(iter(given.values()), DEFAULT_BLOCK_LENGTH)

    def _init_attention(self, kwargs: dict[str, Any]) -> None:
        self.use_qk_norm = kwargs.pop("use_qk_norm", True)
        self.use_rmsnorm = kwargs.pop("use_rmsnorm", True)
        self.use_bias = kwargs.pop("use_bias", False)
        self.use_qkv_bias = kwargs.pop("use_qkv_bias", False)
        self.rope_theta = kwargs.pop("rope_theta", 600000.0)
        rotary = self.rotary_dim = kwargs.pop("rotary_dim", None)
        dim = self.head_dim or max(1, self.hidden_size // self.num_attention_heads)
        implied = 0.5 if rotary is None else min(1.0, rotary / dim)
        self.partial_rotary_factor = kwargs.pop("partial_rotary_factor", implied)

    def _init_experts(self, kwargs: dict[str, Any]) -> None:
        self.num_experts = kwargs.pop("num_experts", 256)
        self.num_experts_per_tok = kwargs.pop("num_experts_per_tok", 8)
        self.num_shared_experts = kwargs.pop("num_shared_experts", 1)
        self.moe_intermediate_size = kwargs.pop("moe_intermediate_size", 512)
        shared = kwargs.pop("moe_shared_expert_intermediate_size", None)
        if shared is not None:  # vLLM's class reads it wherever it is there
            self.moe_shared_expert_intermediate_size = shared
        self.first_k_dense_replace = kwargs.pop("first_k_dense_replace", 1)
        self.n_group = kwargs.pop("n_group", 8)
        self.topk_group = kwargs.pop("topk_group", 4)
        self.norm_topk_prob = kwargs.pop("norm_topk_prob", True)
        self.routed_scaling_factor = kwargs.pop("routed_scaling_factor", 2.5)
        self.score_function = kwargs.pop("score_function", "sigmoid")
        self.router_dtype = kwargs.pop("router_dtype", "fp32")
        self.moe_router_enable_expert_bias = kwargs.pop("moe_router_enable_expert_bias", True)
