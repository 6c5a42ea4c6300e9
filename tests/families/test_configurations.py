"""The families' configurations: what follows from a checkpoint, and what is refused by name."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, Ministral3Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.transformers_utils.config import _maybe_register_hf_config

from tests.support import (
    reference_diffcoder,
    reference_dream,
    reference_fast_dllm,
    reference_llada22,
    reference_nemotron,
    reference_openpangu,
    reference_sdar,
    reference_vision,
)
from vllm_dllm.decoding import EditTokens
from vllm_dllm.families.dream_reasoner import DreamConfig
from vllm_dllm.families.fast_dllm import FastDLLMConfig
from vllm_dllm.families.llada2.family import LLaDA2MoeConfig
from vllm_dllm.families.nemotron_labs_diffusion import (
    MinistralDLMConfig,
    NemotronLabsDiffusionConfig,
)
from vllm_dllm.families.openpangu import PanguEmbeddedConfig
from vllm_dllm.families.registry import family
from vllm_dllm.families.sdar import SDARConfig, SDARMoeConfig, length_of_name
from vllm_dllm.frontend.admission import validate_sampling_params
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.server import DllmSettings
from vllm_dllm.vllm_seams.registration import RefusedError, register_models

ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0}
ROPE |= {"original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}
OLDER = {"model_type": "ministral_dlm", "architectures": ["MinistralDiffEncoderModel"]}
DIFFCODER_MASK, NEMOTRON_MASK = reference_diffcoder.MASK, reference_nemotron.MASK
SDAR_MASK, FAST_MASK = reference_sdar.MASK, reference_fast_dllm.MASK
PANGU_MASK = reference_openpangu.MASK
# Checkpoints with blocks of 8, or 4 of Stable-DiffCoder's.
MAKE: dict[str, Callable[[Path], Any]] = {
    "sdar": lambda path: reference_sdar.random_checkpoint(path, experts=False, block=8),
    "diffcoder": reference_diffcoder.random_checkpoint,
    "nemotron": lambda path: reference_nemotron.random_checkpoint(path, block=8),
    "fast-dllm": lambda path: reference_fast_dllm.random_checkpoint(path, block=8),
    "dream": lambda path: reference_dream.random_checkpoint(path, block=8),
    "openpangu": lambda path: reference_openpangu.random_checkpoint(path, block=8),
    "llada2.2": lambda path: reference_llada22.random_checkpoint22(path, 8),
    "sdar-vl": lambda path: reference_vision.sdar_checkpoint(path, 8),
    "nemotron-vlm": lambda path: reference_vision.nemotron_checkpoint(path, 8),
}


def started(model: Path, **options: Any) -> Any:
    """vLLM's configuration of an engine that serves the checkpoint."""
    from vllm.engine.arg_utils import EngineArgs

    register_models()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return EngineArgs(model=str(model), **options).create_engine_config()


def changed(model: Path, **stated: Any) -> None:
    """Change fields of ``config.json``; None removes one."""
    path = model / "config.json"
    config = json.loads(path.read_text()) | stated
    path.write_text(json.dumps({name: v for name, v in config.items() if v is not None}))


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The checkpoint of the family that the test is parametrized with."""
    path = tmp_path / f"{request.param}-b16"
    MAKE[request.param](path)
    return path


def of_family(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("model", [name], indirect=True)


def dllm(**settings: Any) -> dict[str, Any]:
    return {"additional_config": {"dllm": settings}}


# ---- Configuration classes


@pytest.mark.parametrize(
    ("config_class", "usual", "name"),
    [
        (SDARConfig, 4, "block_size"),
        (SDARMoeConfig, 4, "block_size"),
        (NemotronLabsDiffusionConfig, 32, "block_size"),
        (FastDLLMConfig, 32, "bd_size"),
        (DreamConfig, None, "block_size"),
        (LLaDA2MoeConfig, 32, "block_length"),
    ],
)
def test_the_block_length_of_a_configuration(
    config_class: Any, usual: int | None, name: str
) -> None:
    assert config_class().canvas_length == usual
    assert config_class(**{name: 8}).canvas_length == 8
    assert config_class(canvas_length=16).canvas_length == 16
    if config_class in (SDARConfig, SDARMoeConfig):
        # That of training is not selected.
        assert config_class(attn_implementation="flex_attention")._attn_implementation is None
        for length in (2.5, "8", True):
            with pytest.raises(StrictDataclassError, match="'block_size' expected int"):
                config_class(block_size=length)


@pytest.mark.parametrize(
    ("model", "length"),
    [
        ("JetLM/SDAR-4B-Chat-b16", 16),
        ("/models/SDAR-1.7B-Chat-b64/", 64),
        ("/hub/models--JetLM--SDAR-8B-Chat-b32/snapshots/0b1c-b4x", 32),
        ("JetLM/SDAR-30B-A3B-Chat", None),
        ("SDAR-b5", None),
        ("SDAR-b160", None),
    ],
)
def test_the_block_length_of_a_published_name(model: str, length: int | None) -> None:
    assert length_of_name(model) == length


def test_stock_classes_keep_their_own_names() -> None:
    """A class that is registered under a second name would be renamed in the whole process."""
    register_models()
    for name, config_class in (
        ("sdar", SDARConfig),
        ("sdar_moe", SDARMoeConfig),
        ("nemotron_labs_diffusion", NemotronLabsDiffusionConfig),
        ("ministral_dlm", MinistralDLMConfig),
    ):
        _maybe_register_hf_config(config_class())
        assert isinstance(AutoConfig.for_model(name), config_class)
    stock = (Qwen2Config, Qwen3Config, Qwen3MoeConfig, Ministral3Config)
    assert [one.model_type for one in stock] == ["qwen2", "qwen3", "qwen3_moe", "ministral3"]


def test_what_nemotrons_rope_parameters_imply() -> None:
    """The attention factor is 1 although a scale is left out, and queries grow as in Llama 4."""
    config = NemotronLabsDiffusionConfig(rope_parameters=dict(ROPE), block_size=16)
    assert config.rope_parameters["attention_factor"] == 1.0
    assert config.llama_4_scaling == {"beta": 0.1, "original_max_position_embeddings": 16384}
    # What transformers writes for a fine-tuned variant is read again.
    again = NemotronLabsDiffusionConfig(**json.loads(config.to_json_string(use_diff=False)))
    assert (again.canvas_length, again.llama_4_scaling) == (16, config.llama_4_scaling)
    plain = {"rope_type": "default", "rope_theta": 1e6}
    assert NemotronLabsDiffusionConfig(rope_parameters=plain).llama_4_scaling is None


def test_fields_that_llada2_leaves_out_have_the_authors_values() -> None:
    config = LLaDA2MoeConfig(hidden_size=2048, num_attention_heads=16, head_dim=128)
    assert config.use_qk_norm, "vLLM's BailingMoeV2 would assume false"
    assert not LLaDA2MoeConfig(use_qk_norm=False).use_qk_norm
    assert config.mask_token_id is None
    assert config.partial_rotary_factor == 0.5
    assert not config.tie_word_embeddings


def test_a_head_whose_size_is_not_stated() -> None:
    """Qwen3-MoE's class has no such field; without one a head is a share of the hidden size."""
    assert SDARMoeConfig(hidden_size=512, num_attention_heads=4).head_dim == 128
    assert SDARMoeConfig(hidden_size=512, num_attention_heads=4, head_dim=96).head_dim == 96


def test_a_value_of_another_type_is_refused_by_its_field() -> None:
    """Also where vLLM sets ``--hf-overrides`` on the finished configuration."""
    with pytest.raises(StrictDataclassError, match="'hidden_size' expected int"):
        LLaDA2MoeConfig(hidden_size="8")
    with pytest.raises(StrictDataclassError, match="'num_experts' expected int"):
        LLaDA2MoeConfig().update({"num_experts": "8"})


# ---- Configurations of engines

LONGER = {"diffusion_config": {"canvas_length": 32}}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("model", "stated", "options", "length", "mask"),
    [
        # An option, then a field, then SDAR's name.
        ("sdar", {}, LONGER, 32, SDAR_MASK),
        ("sdar", {}, {}, 8, SDAR_MASK),
        ("sdar", {"block_size": None}, {}, 16, SDAR_MASK),
        ("diffcoder", {}, LONGER, 32, DIFFCODER_MASK),
        ("diffcoder", {}, {}, 4, DIFFCODER_MASK),
        ("diffcoder", {}, {"hf_overrides": {"block_length": 2}}, 2, DIFFCODER_MASK),
        ("diffcoder", {"block_size": 8, "mask_token_id": 9}, {}, 8, 9),
        ("diffcoder", {}, {"hf_overrides": {"mask_token_id": 7}}, 4, 7),
        ("nemotron", {}, LONGER, 32, NEMOTRON_MASK),
        ("nemotron", {}, {"hf_overrides": {"mask_token_id": 7}}, 8, 7),
        ("nemotron", {"mask_token_id": None}, {}, 8, 100),
        ("nemotron", OLDER, {}, 8, NEMOTRON_MASK),
        ("fast-dllm", {}, {}, 8, FAST_MASK),
        ("fast-dllm", {}, {"hf_overrides": {"bd_size": 4, "mask_token_id": 7}}, 4, 7),
        ("dream", {}, {}, 8, SDAR_MASK),
        ("dream", {}, {"hf_overrides": {"block_size": 4, "mask_token_id": 7}}, 4, 7),
        ("openpangu", {}, LONGER, 32, PANGU_MASK),
        ("openpangu", {"mask_token_id": None}, {"hf_overrides": {"mask_token_id": 7}}, 8, 7),
        ("openpangu", {"block_size": None}, {}, 32, PANGU_MASK),
        ("llada2.2", {}, {}, 8, 299),
        ("nemotron-vlm", {"mask_token_id": None}, {}, 8, 100),
        ("nemotron-vlm", {}, {"hf_overrides": {"block_size": 4, "mask_token_id": 7}}, 4, 7),
        # The fields of SDAR-VL are those of its text, and its type may be LLaVA-OneVision's.
        ("sdar-vl", {"model_type": "llava_onevision"}, {}, 8, 299),
        ("sdar-vl", {}, LONGER, 32, 299),
        *(
            ("sdar-vl", {}, {"hf_overrides": stated}, 4, 7)
            for own in ({"block_size": 4, "mask_token_id": 7},)
            for stated in (own, {"text_config": own})
        ),
    ],
    indirect=["model"],
)
def test_the_block_length_and_the_mask(
    model: Path, stated: dict[str, Any], options: dict[str, Any], length: int, mask: int
) -> None:
    changed(model, **stated)
    config = started(model, **options)
    assert config.model_config.is_diffusion
    assert config.diffusion_config.canvas_length == length
    assert (config.model_config.dllm.length, config.model_config.dllm.mask_token) == (length, mask)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("sdar", {"mask_token_id": 300}, {}, "mask_token_id 300 is not a token id.*--hf-overrides"),
    ("sdar", {"mask_token_id": -1}, {}, "mask_token_id -1 is not a token id"),
    ("sdar", {"block_size": 0}, {}, "block_size must be"),
    ("sdar", {"model_type": "sdar_next"}, {}, "sdar_next"),
    ("sdar", {"use_regular_causal": True}, {}, "use_regular_causal.*causal"),
    (
        *("sdar", {"use_sliding_window": True, "sliding_window": 64}, {}),
        "sliding_window=64.*serve contexts that fit into it with --disable-sliding-window",
    ),
    ("diffcoder", {"block_size": "8"}, {}, "block_size must be"),
    ("diffcoder", {"is_causal": False}, {}, "is_causal=False asks for"),
    ("diffcoder", {"sliding_window": 64}, {}, "sliding_window=64"),
    *(
        ("nemotron", stated, {}, words)
        for stated, words in (
            ({"ar_mode": True}, "ar_mode=True asks for .* LinearSpec"),
            ({"sliding_window": 64}, "sliding_window"),
        )
    ),
    ("nemotron", {}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
    ("nemotron", {}, dllm(fused_commit="on"), "different masks"),
    ("nemotron", {}, dllm(window="reference"), "dllm.window"),
    ("nemotron", {}, dllm(kernels="triton"), "dllm.kernels=triton"),
    *(
        ("sdar-vl", stated, options, words)
        for stated, options, words in (
            ({"vision_feature_layer": -2}, {}, "vision_feature_layer=-2"),
            ({"vision_aspect_ratio": "anyres_max_4"}, {}, "vision_aspect_ratio"),
            ({}, {"hf_overrides": {"text_config": {"is_causal": False}}}, "text_config.is_causal"),
            ({}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
            ({}, {"disable_chunked_mm_input": True}, "--disable-chunked-mm-input"),
            ({}, dllm(blocks=2), "dllm.blocks=2"),
        )
    ),
    ("nemotron-vlm", {"vision_feature_layer": -2}, {}, "vision_feature_layer=-2"),
    ("fast-dllm", {}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
    ("fast-dllm", {}, dllm(fused_commit="on"), "fused_commit=on: impossible"),
    *(
        ("dream", stated, {}, "Dream-7B, Dream-Coder and DiffuCoder denoise the whole answer at")
        for stated in ({"block_size": None}, {"block_size": None, "architectures": ["DreamModel"]})
    ),
    ("dream", {"attention_bias": True}, {}, "attention_bias=True asks for"),
    ("openpangu", {"sandwich_norm": True}, {}, "sandwich_norm=True asks for"),
    ("openpangu", {"mask_token_id": 300}, {}, "mask_token_id 300 is not a token id"),
    ("openpangu", {}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
    ("openpangu", {}, dllm(fused_commit="on"), "fused_commit=on: impossible"),
    ("openpangu", {}, dllm(algorithm="LinearSpec"), "LinearSpec verifies its drafts"),
    *(
        ("llada2.2", stated, options, re.escape(words))
        for stated, options, words in (
            ({"delete_token_id": None}, {}, "delete_token_id is missing; pass --hf-over"),
            ({"split_token_id": 300}, {}, "split_token_id=300 must be in [0, vocab_size"),
            ({}, {"hf_overrides": {"split_token_id": 290}}, "must be three different ids"),
            ({"expert_capacity": 1}, {}, "must be at least num_experts_per_tok=2"),
            ({"expert_capacity": 17}, {}, "at most num_experts=16"),
            ({"norm_topk_prob": False}, {}, "norm_topk_prob=False asks for"),
            ({}, {"data_parallel_size": 2}, "--data-parallel-size: the experts of LLaDA2.2"),
            ({"expert_capacity": 0}, {}, "delete_token_id=290 asks for tokens that are deleted"),
        )
    ),
]


@pytest.mark.engine
@pytest.mark.parametrize(("model", "stated", "options", "words"), REFUSED, indirect=["model"])
def test_what_is_refused_by_name(
    model: Path, stated: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    changed(model, **stated)
    # Types of models are refused where the file is read.
    with pytest.raises(Exception if "model_type" in stated else RefusedError, match=words):
        started(model, **options)


@pytest.mark.engine
@of_family("sdar")
def test_a_length_that_is_neither_stated_nor_in_the_name(model: Path) -> None:
    changed(model, block_size=None)
    unnamed = model.rename(model.with_name("SDAR-tiny"))
    assert started(unnamed).diffusion_config.canvas_length == 4


def respelled(model: Path, old: str, new: str) -> Path:
    """A token gets another name, in another folder: a process keeps what it has read."""
    model = model.rename(model.with_name(f"{model.name}-again"))
    file = model / "tokenizer.json"
    file.write_text(file.read_text().replace(f'"{old}"', f'"{new}"'))
    return model


@pytest.mark.engine
@of_family("sdar")
def test_the_mask_is_the_tokenizers_where_the_checkpoint_states_none(model: Path) -> None:
    changed(model, mask_token_id=None)
    with pytest.raises(RefusedError, match=r"no mask token.*'<\|MASK\|>', '<MASK>'"):
        started(model)
    config = started(respelled(model, f"t{SDAR_MASK}", "<MASK>")).model_config
    assert config.hf_config.mask_token_id == SDAR_MASK


@pytest.mark.engine
@of_family("diffcoder")
def test_the_mask_is_the_authors_where_the_tokenizer_has_none(model: Path) -> None:
    changed(model, mask_token_id=None)
    for old, new, mask in (("<[MASK_TOKEN]>", "t5", 5), ("t299", "<[MASK_TOKEN]>", 299)):
        model = respelled(model, old, new)
        assert started(model).model_config.hf_config.mask_token_id == mask


@pytest.mark.engine
def test_a_vocabulary_without_the_authors_mask(tmp_path: Path) -> None:
    small = reference_diffcoder.random_checkpoint(tmp_path / "model", vocab_size=4)
    with pytest.raises(RefusedError, match=r"mask_token_id 5 is not a token id in \[0, 4\)"):
        started(small, skip_tokenizer_init=True)


@pytest.mark.engine
@of_family("diffcoder")
def test_llama_stays_what_it_is(model: Path) -> None:
    changed(model, architectures=["LlamaForCausalLM"], auto_map=None)
    assert not started(model).model_config.is_diffusion


@pytest.mark.engine
@of_family("openpangu")
def test_without_a_mask_openpangu_is_vllms_own(model: Path) -> None:
    changed(model, mask_token_id=None)
    config = started(model).model_config
    assert config.architecture == "PanguEmbeddedForCausalLM"
    assert not config.is_diffusion
    own, _ = config.registry.resolve_model_cls([config.architecture], config)
    assert own.__module__ == "vllm.model_executor.models.openpangu"


def test_what_openpangus_file_may_leave_out() -> None:
    """The authors' defaults; a mask that is taken back leaves no canvas."""
    config = PanguEmbeddedConfig(architectures=["PanguEmbeddedForCausalLM"])
    assert (config.bias, config.attention_bias, config.canvas_length) == (True, False, None)
    assert config.rope_parameters["rope_theta"] == 1.6e7
    config.update({"mask_token_id": 45830})
    assert (config.attention_bias, config.canvas_length) == (True, 32)
    assert config.architectures == ["OpenPanguDiffusionForCausalLM"]
    assert not PanguEmbeddedConfig(bias=False, mask_token_id=7).attention_bias
    assert DreamConfig(hidden_size=64, num_attention_heads=4, head_dim=None).head_dim == 16


@pytest.mark.engine
@of_family("dream")
def test_the_rules_of_dreamreasoner(model: Path) -> None:
    """Only its static rule fills a block in one step, unless the request says otherwise."""
    served = started(model).model_config.dllm
    assert served.choose().algorithm.name == "LowConfidenceDynamic"
    assert served.choose().settings.values() == {"steps": 1 << 16, "threshold": 0.9}
    for asked, steps in (({}, 1), ({"steps": 3}, 3)):
        choice = served.choose({"algorithm": "LowConfidenceStatic", **asked})
        assert choice.settings.values() == {"steps": steps}
    bound = served.choose({"algorithm": "TokenEntropyBounded"}).settings.values()
    assert bound["entropy_bound"] == 0.35
    assert family("DreamForCausalLM").end_tokens == (151645, 151643)
    assert served.end_tokens == [], "this vocabulary has neither"
    assert pickle.loads(pickle.dumps(served)) == served, "it travels to the workers"


@pytest.mark.engine
@of_family("sdar")
def test_recommended_sampling(model: Path) -> None:
    """Of ``generation_config.json``; a request that states nothing is greedy without it."""
    path = model / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert started(model).model_config.get_diff_sampling_param()["temperature"] == 0
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    path.write_text(json.dumps({"eos_token_id": [1, 2], **recommended}))
    assert started(model).model_config.get_diff_sampling_param() == recommended
    unread = started(model, generation_config="vllm").model_config
    assert unread.get_diff_sampling_param() == {"temperature": 0}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("model", "sub_block_length", "more"),
    [("fast-dllm", 8, set()), ("openpangu", 32, {"canvas_options"})],
    indirect=["model"],
)
def test_what_requests_of_shifted_models_may_not_ask_for(
    model: Path, sub_block_length: int, more: set[str]
) -> None:
    served = started(model).model_config.dllm
    choice = served.choose()
    assert choice.algorithm.name == "SubBlocks"
    assert choice.settings.values() == {"threshold": 1.0, "sub_block_length": sub_block_length}
    assert served.excludes == {"constraints", "logprobs", "traces", "row_options"} | more


# ---- The rules of single families


@pytest.mark.parametrize("architecture", ["LLaDA2MoeModelLM", "SDARForCausalLM"])
def test_other_families_have_no_causal_pass(architecture: str) -> None:
    """Refused for a server and for a request, and no harm done by its presence."""
    other = family(architecture)
    asked = Served("mask", other.algorithm, DllmSettings(), verifies=other.verifies)
    with pytest.raises(SettingsError, match="diffusion_algorithm: LinearSpec verifies its drafts"):
        asked.choose({"algorithm": "LinearSpec"})
    server = Served("mask", other.algorithm, DllmSettings(algorithm="LinearSpec"))
    with pytest.raises(SettingsError, match=r"dllm\.algorithm: LinearSpec verifies its drafts"):
        server.choose()
    verifying = Served("mask", "LowConfidence", DllmSettings(algorithm="LinearSpec"), verifies=True)
    assert verifying.choose().settings.values() == {"threshold": 0.0}


@pytest.mark.engine
@of_family("llada2.2")
def test_the_ids_of_edits(model: Path) -> None:
    served = started(model).model_config.dllm
    assert served.edit_tokens == EditTokens(299, 290, 291)
    choice = served.choose()
    assert choice.algorithm.name == "JointThresholdInDel"
    usual = {"threshold": 0.5, "edit_threshold": 0.0, "steps": 32, "max_post_edit_steps": 16}
    assert (choice.settings.values(), choice.max_steps) == (usual, 32 + 16 + 2)
    changed(model, delete_token_id=None)
    ids = {"delete_token_id": 7, "mask_token_id": 8, "expert_capacity": 16}
    config = started(model, hf_overrides=ids).model_config
    assert config.dllm.edit_tokens == EditTokens(8, 7, 291)
    assert config.hf_config.expert_capacity == 16


@pytest.mark.engine
@of_family("llada2.2")
def test_edits_are_refused_elsewhere(model: Path) -> None:
    """LLaDA2.1 predicts no edits; the server and a request name what they asked for."""
    changed(model, **dict.fromkeys(("expert_capacity", "delete_token_id", "split_token_id")))
    rule = "JointThresholdInDel"
    with pytest.raises(RefusedError, match=r"dllm\.algorithm: JointThresholdInDel is for models"):
        started(model, **dllm(algorithm=rule))
    config = started(model).model_config
    assert config.architecture == "LLaDA2MoeModelLM"
    asked = SamplingParams(temperature=0, extra_args={"diffusion_algorithm": rule})
    with pytest.raises(VLLMValidationError, match="diffusion_algorithm: JointThresholdInDel is"):
        validate_sampling_params(asked, config.dllm, own_maximum=True)


EDITS: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 1}, "logprobs cannot be combined with JointThresholdInDel"),
    ({"logit_bias": {3: 1.0}}, "logit_bias cannot be combined"),
    ({"temperature": 0.5}, "temperature=0.5 is not supported by JointThresholdInDel"),
    ({"extra_args": {"diffusion_trace": True}}, "diffusion_trace cannot be combined"),
    ({"extra_args": {"diffusion_stream_prefix": True}}, "may still change what it has decided"),
    ({"extra_args": {"diffusion_steps": 129}}, "diffusion_steps must be at most 32"),
]
DRAFTS: list[tuple[dict[str, Any], str]] = [
    *(
        (asked, next(iter(asked)))
        for asked in (
            {"temperature": 0.7},
            {"logprobs": 1},
            {"presence_penalty": 0.5},
            {"logit_bias": {5: 1.0}},
            {"min_tokens": 3},
            {"structured_outputs": StructuredOutputsParams(regex="a")},
        )
    ),
    *(
        ({"extra_args": {name: value}}, name)
        for name, value in (
            ("diffusion_trace", True),
            ("diffusion_stream_prefix", True),
            ("diffusion_steps", 3),
        )
    ),
]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("model", "rule", "refused"),
    [("llada2.2", {}, EDITS), ("nemotron", {"diffusion_algorithm": "LinearSpec"}, DRAFTS)],
    indirect=["model"],
)
def test_what_a_request_of_a_rule_cannot_ask_for(
    model: Path, rule: dict[str, str], refused: list[tuple[dict[str, Any], str]]
) -> None:
    served = started(model).model_config.dllm
    for asked, message in refused:
        options = {"temperature": 0} | asked
        options["extra_args"] = rule | asked.get("extra_args", {})
        with pytest.raises(VLLMValidationError, match=message):
            validate_sampling_params(SamplingParams(**options), served, own_maximum=True)
    if rule:  # no canvas of Nemotron-Labs-Diffusion leaves in parts, whatever the rule
        streamed = SamplingParams(extra_args={"diffusion_stream_prefix": True})
        with pytest.raises(VLLMValidationError, match="diffusion_stream_prefix"):
            validate_sampling_params(streamed, served, own_maximum=True)
