"""Every argument of vLLM's engine is refused, served, or of no concern: none was overlooked."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from functools import reduce
from typing import Any

import pytest
import vllm
from packaging.version import Version

from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_GEMMA, TINY_LLADA2
from tests.support.engine import engine, greedy
from vllm_dllm.startup.checks import REFUSED as BY_CHECKS
from vllm_dllm.startup.checks import refuse_unsupported


def names(text: str) -> set[str]:
    return set(text.split())


# The arguments that a release after 0.32 has added.
LATER = {"monokernel": "0.33", "sleep_mode_backend": "0.33", "watchdog_config": "0.33"}

REFUSED: dict[str, str] = {
    **{path.rpartition(".")[2]: "by vllm_dllm.startup.checks.REFUSED" for path in BY_CHECKS},
    **dict.fromkeys(
        ("decode_context_parallel_size", "prefill_context_parallel_size"),
        "by vllm_dllm.startup.checks: context parallelism",
    ),
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), "they set speculative_config"),
    "kv_offloading_size": "by vllm_dllm.startup.kv_transfer",
    "enable_elastic_ep": "it needs enable_eplb",
    # By vLLM itself.
    "return_sampling_mask": "sampling distribution replay does not support diffusion models",
    "per_request_spec_decode_metrics": "it needs speculative_config",
    "enable_hc_sp": "for models of other architectures",
    "engram_config": "for models of other architectures",
}

# Engines are started with these values together and answer as one with none of them.
TRIED: dict[str, dict[str, Any]] = {
    "scheduling": {
        "async_scheduling": True, "disable_log_stats": False,
        "enable_logging_iteration_details": True, "enable_mfu_metrics": True,
        "cudagraph_metrics": True, "jit_monitor_mode": "warn", "kv_cache_metrics": True,
        "kv_cache_metrics_sample": 1.0,
        "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
        "long_prefill_token_threshold": 64, "long_prefill_token_threshold_adaptive": True,
        "max_logprobs": 5, "max_num_active_seqs": 2, "max_num_scheduled_tokens": 512,
        "prefill_schedule_interval": 2, "prefix_caching_hash_algo": "sha256_cbor",
        "scheduler_reserve_full_isl": False, "scheduling_policy": "priority",
        "stream_interval": 3, "watermark": 0.1,
        "worker_extension_cls": "tests.support.trainer_side.Receiver",
    },
    "memory": {
        "allow_deprecated_quantization": True, "block_size": 64, "cpu_offload_gb": 0.001,
        "disable_cascade_attn": True, "disable_hybrid_kv_cache_manager": True,
        "disable_sliding_window": True, "enable_chunked_prefill": False,
        "enable_prefix_caching": False, "generation_config": "vllm", "ignore_patterns": "*.bin",
        "model_impl": "vllm", "num_gpu_blocks_override": 40, "optimization_level": 0,
        "performance_mode": "throughput", "seed": 3, "skip_tokenizer_init": True,
        "tokens_only": True,
    },
    "pictures": {
        "disable_chunked_mm_input": True, "enable_mm_processor_stats": True,
        "interleave_mm_strings": True, "kv_cache_dtype_skip_layers": [],
        "limit_mm_per_prompt": {"image": 1, "video": 0}, "media_io_kwargs": {"image": {}},
        "mm_encoder_tp_mode": "data", "mm_hasher_algorithm": "sha256", "mm_processor_cache_gb": 0,
        "mm_processor_kwargs": {"max_soft_tokens": 70}, "prefix_cache_retention_interval": 128,
        "skip_mm_profiling": True,
    },
    "text": {"language_model_only": True},
}  # fmt: skip

# Served; other tests start engines or servers with them, or they need what a CPU lacks.
SERVED = names(
    """
    model model_weights served_model_name tokenizer tokenizer_mode hf_config_path runner convert
    pooler_config trust_remote_code download_dir load_format config_format revision code_revision
    tokenizer_revision hf_overrides model_loader_extra_config dtype quantization
    quantization_config kv_cache_dtype enforce_eager compilation_config cudagraph_capture_sizes
    max_cudagraph_capture_size attention_config attention_backend kernel_config moe_backend
    linear_backend max_model_len max_num_seqs max_num_batched_tokens max_num_queued_reqs
    max_num_queued_tokens gpu_memory_utilization kv_cache_memory_bytes prefix_match_unit
    logprobs_mode distributed_executor_backend tensor_parallel_size pipeline_parallel_size
    data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local
    data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
    data_parallel_multi_port_external_lb data_parallel_backend enable_expert_parallel nnodes
    worker_cls enable_lora max_loras max_lora_rank max_cpu_loras lora_dtype lora_target_modules
    fully_sharded_loras specialize_active_lora default_mm_loras enable_tower_connector_lora
    enable_mixed_moe_lora_format enable_moe_shared_loras diffusion_config additional_config
    override_generation_config structured_outputs_config reasoning_parser reasoning_parser_plugin
    reasoning_config aux_output_config kv_transfer_config weight_transfer_config
    enable_log_requests mm_processor_cache_type enable_sleep_mode sleep_mode_backend
    sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator
    offload_backend cpu_offload_params offload_group_size offload_num_in_group
    offload_prefetch_step offload_params
    """
)

# How files are read, processes talk and are placed, and logs are written; other kinds of models;
# and details of what is refused.
NO_CONCERN = names(
    """
    allowed_local_media_path allowed_media_domains hf_token use_tqdm_on_load pt_load_map_location
    safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
    max_parallel_loading_workers io_processor_plugin renderer_num_workers master_addr master_port
    node_rank distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes
    numa_bind_cpus device_ids disable_custom_all_reduce enable_shm_tensor_arena
    disable_nccl_for_dp_synchronization dp_sync_interval all2all_backend enable_ep_weight_filter
    expert_placement_strategy enable_nccl_comm_suspend ray_workers_use_nsight _api_process_count
    _api_process_rank shutdown_timeout enable_fault_tolerance fault_tolerance_config
    watchdog_config aggregate_engine_logging logging_config log_level log_config_file
    profiler_config show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
    custom_histogram_buckets enable_layerwise_nvtx_tracing jit_monitor_verbose
    fail_on_environ_validation ir_op_priority enable_flashinfer_autotune monokernel
    sparse_indexer_topk_backend swa_bounded_replay max_lora_cls_labels mamba_config
    mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend
    mamba_ssu_algorithm mamba_cache_philox_rounds enable_mamba_cache_stochastic_rounding
    enable_mamba_shared_prefix_checkpoint use_replayssm replayssm_buffer_len gdn_prefill_backend
    kda_prefill_backend kda_decode_backend video_pruning_rate video_pruning_method
    mm_shm_cache_max_object_size_mb mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
    mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin dcp_comm_backend
    dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
    dbo_decode_token_threshold dbo_prefill_token_threshold eplb_config elastic_ep_max_dp_size
    ec_manager_config kv_offloading_backend
    """
)


TABLES = [REFUSED, SERVED, NO_CONCERN, *TRIED.values()]
PROMPTS = [[(7 * i + n) % 200 for i in range(9 + 35 * n)] for n in range(4)]


def known() -> set[str]:
    """The arguments that the installed release should have."""
    return {
        name
        for table in TABLES
        for name in table
        if Version(vllm.__version__) >= Version(LATER.get(name, "0"))
    }


def test_every_argument_is_in_one_table() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    has = {field.name for field in fields(AsyncEngineArgs)}
    assert has - known() == set(), "say in one of the tables what becomes of these"
    assert known() - has == set(), "the release has no such arguments"
    twice = [name for name, count in Counter(n for t in TABLES for n in t).items() if count > 1]
    assert twice == []


@pytest.mark.engine
def test_what_is_refused_has_a_place_in_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that a release has renamed would refuse nothing."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = EngineArgs(model=str(TINY_GEMMA), max_model_len=512).create_engine_config()
    config.scheduler_config.scheduler_cls = None  # which this package sets after the check
    refuse_unsupported(config)
    for path in BY_CHECKS:
        *above, name = path.split(".")
        place = reduce(getattr, above, config)
        assert hasattr(place, name) and not getattr(place, name), path
        flag = f"--{name.replace('_', '-')}: .*; remove it"
        with monkeypatch.context() as changed, pytest.raises(ValueError, match=flag):
            changed.setattr(place, name, ["given"])
            refuse_unsupported(config)


def answers(tried: dict[str, Any], gemma: bool) -> list[tuple[list[int], str]]:
    model = TINY_GEMMA if gemma else TINY_LLADA2
    if gemma and not tried:
        tried = TEXT_ONLY_OPTIONS
    asked = [
        greedy(40),
        greedy(24, ignore_eos=True),
        greedy(10, detokenize=False),
        greedy(33, logprobs=2),
    ]
    with engine(model, 32, **tried) as running:
        found = running.generate(PROMPTS, asked)
        assert running.generate(PROMPTS, asked) == found, "from the prefix cache"
        return found


@pytest.fixture(scope="module")
def plain() -> dict[bool, list[tuple[list[int], str]]]:
    """The answers of engines with none of the arguments, by whether it is DiffusionGemma."""
    return {gemma: answers({}, gemma) for gemma in (False, True)}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("group", TRIED)
def test_an_engine_answers_as_without(
    group: str, plain: dict[bool, list[tuple[list[int], str]]]
) -> None:
    gemma = group in ("pictures", "text")
    assert answers(TRIED[group], gemma) == plain[gemma]
