"""The configuration class of LLaDA2, so that no ``trust_remote_code`` is needed.

It is separate from the model because it is imported in every process (and pickled to workers),
while the model class is imported only where the model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from transformers import PretrainedConfig

from vllm_dllm.families.config_fields import SupportedValues, check_supported
from vllm_dllm.ranges import Range, SettingsError, shown
from vllm_dllm.settings.server import DEFAULT_BLOCK_LENGTH, LENGTH, LENGTHS

_COUNT = Range(least=1, most=1 << 16, whole=True)
_SIZE = Range(least=1, most=1 << 24, whole=True)
_COUNT_OR_ZERO = Range(most=1 << 16, whole=True)
_SHARE = Range(above=True, most=1.0)
# The fields that the model's class reads: the value where a checkpoint leaves one out, which is the
# authors', and what it may be: a number in a range, true or false (bool), or one of a few.
_FIELDS: Mapping[str, tuple[Any, Range | type[bool] | tuple[str | None, ...]]] = {
    "vocab_size": (157184, _SIZE),
    "hidden_size": (2048, _SIZE),
    "intermediate_size": (5120, _SIZE),
    "num_hidden_layers": (20, _COUNT),
    "num_attention_heads": (16, _COUNT),
    "head_dim": (None, _COUNT),
    "rms_norm_eps": (1e-6, _SHARE),
    "max_position_embeddings": (32768, Range(least=1, whole=True)),
    "use_qk_norm": (True, bool),
    "use_bias": (False, bool),
    "use_qkv_bias": (False, bool),
    "rope_theta": (600000.0, Range(above=True)),
    "rotary_dim": (None, _COUNT),
    "num_experts": (256, _COUNT),
    "num_experts_per_tok": (8, _COUNT),
    "num_shared_experts": (1, _COUNT_OR_ZERO),
    "moe_intermediate_size": (512, _SIZE),
    "first_k_dense_replace": (1, _COUNT_OR_ZERO),
    "n_group": (8, _COUNT),
    "topk_group": (4, _COUNT),
    "norm_topk_prob": (True, bool),
    "routed_scaling_factor": (2.5, Range(above=True)),
    "score_function": ("sigmoid", ("sigmoid", "softmax", None)),
    "router_dtype": ("fp32", ("fp32", "bf16", None)),
    "moe_router_enable_expert_bias": (True, bool),
    "embedding_dropout": (0.0, Range(most=1.0)),
    "norm_head": (False, bool),
    "mask_token_id": (None, Range(most=1 << 24, whole=True)),
    "tie_word_embeddings": (False, bool),
}
# Fields whose value follows from others where a checkpoint leaves them out.
_DERIVED: Mapping[str, Range] = {
    "num_key_value_heads": _COUNT,
    "partial_rotary_factor": _SHARE,
    "moe_shared_expert_intermediate_size": _SIZE,
    **dict.fromkeys(LENGTHS, LENGTH),
}
_ALLOWED: Mapping[str, Any] = {name: allowed for name, (_, allowed) in _FIELDS.items()} | dict(
    _DERIVED
)
# Fields that may be null: the value comes from elsewhere, or there are no groups.
_OPTIONAL = frozenset(
    {"head_dim", "rotary_dim", "n_group", "topk_group", "mask_token_id", *LENGTHS}
    | {"moe_shared_expert_intermediate_size"}
)
SUPPORTED: SupportedValues = {
    "expert_capacity": ((None, 0), "experts chosen for whole blocks (LLaDA2.2)"),
    "delete_token_id": ((None,), "tokens that are deleted from a canvas (LLaDA2.2)"),
    "split_token_id": ((None,), "tokens that are inserted into a canvas (LLaDA2.2)"),
    "norm_softmax": ((None, False), "a normalised softmax"),
    "using_split_qkv_in_self_attention": (
        (None, False),
        "query, key and value in matrices of their own",
    ),
    "use_rmsnorm": ((None, True), "layer norm"),
    "hidden_act": (("silu",), "another activation than SiLU"),
}
# Training, caching and dropout, and a window that the authors' code states but never applies.
INERT = frozenset(
    {"attention_dropout", "embedding_dropout", "output_dropout", "initializer_range", "use_cache"}
    | {"max_window_layers", "sliding_window", "use_sliding_window", "output_router_logits"}
    | {"router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers"}
    | {"mtp_loss_scaling_factor", "moe_router_bias_update_rate"}
)
# Every field that has a meaning here or is known to have none.
KNOWN_FIELDS = (
    frozenset(_ALLOWED)
    | frozenset(SUPPORTED)
    | INERT
    # Read by vLLM.
    | {"rope_scaling", "rope_parameters"}
)


def check_field(name: str, value: object) -> None:
    """Raise `SettingsError` for a field of ``config.json`` that cannot be honoured.

    The field is null, out of range, or asks for something that this package does not support.
    """
    stated = f"config.json: {name}"
    check_supported(name, value, SUPPORTED)
    allowed = _ALLOWED.get(name)
    if isinstance(allowed, Range) and not (value is None and name in _OPTIONAL):
        allowed.check(stated, value)
    if allowed is bool and not isinstance(value, bool):
        raise SettingsError(f"{stated} must be true or false, got {shown(value)}")
    if isinstance(allowed, tuple) and value not in allowed:
        raise SettingsError(f"{stated} must be one of {allowed}, got {shown(value)}")


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
        stated = {name: default for name, (default, _) in _FIELDS.items()} | kwargs
        heads, rotary = stated["num_attention_heads"], stated["rotary_dim"]
        dim = stated["head_dim"] or max(1, stated["hidden_size"] // heads)
        stated.setdefault("num_key_value_heads", min(4, heads))
        stated.setdefault(
            "partial_rotary_factor", 0.5 if rotary is None else min(1.0, rotary / dim)
        )
        stated.setdefault("hidden_act", "silu")
        stated.setdefault("use_rmsnorm", True)
        if stated.get("moe_shared_expert_intermediate_size", 0) is None:
            del stated["moe_shared_expert_intermediate_size"]  # vLLM reads it wherever it is
        stated |= _lengths({name: stated.pop(name, None) for name in LENGTHS})
        own = [name for name in (*_ALLOWED, "hidden_act", "use_rmsnorm") if name in stated]
        own.remove("tie_word_embeddings")  # transformers takes it itself
        self.__dict__.update({name: stated.pop(name) for name in own})
        fill_in(self)
        super().__init__(**stated)
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


def _lengths(given: Mapping[str, int | None]) -> dict[str, int | None]:
    """L, by any of its names; LLaDA2.2 calls it ``block_size``."""
    stated = {name: length for name, length in given.items() if length is not None}
    if len(set(stated.values())) > 1:
        names = " and ".join(f"{name}={length}" for name, length in stated.items())
        raise SettingsError(
            f"config.json: {names} are {('two', 'three')[len(stated) - 2]} names for one number"
        )
    return {
        "block_length": stated.get("block_length", stated.get("block_size")),
        "canvas_length": next(iter(stated.values()), DEFAULT_BLOCK_LENGTH),
    }
