"""The seams that ``docs/seams.md`` lists: what of vLLM each is, and the tests that show it.

A seam is a row of one of the page's tables. Its first cell names functions and fields of vLLM by
what follows the module, or packages of vLLM with all names in them that are recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.checkpoints import ROOT

PAGE = ROOT / "docs" / "seams.md"

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_LOGGER = "vllm.v1.metrics.loggers:PrometheusStatLogger"
# What is neither wrapped nor overridden nor a base class: fields and methods of single objects.
USED = (
    "vllm.v1.worker.gpu.sample.output:SamplerOutput.num_nans",
    "vllm.v1.worker.gpu.sample.output:SamplerOutput.logprobs_tensors",
    "vllm.v1.outputs:ModelRunnerOutput.num_nans_in_logits",
    "vllm.v1.outputs:ModelRunnerOutput.logprobs",
    "vllm.v1.engine:EngineCoreOutput.new_sampling_mask",
    "vllm.v1.metrics.stats:SchedulerStats.num_kv_fetch_reqs_by_stage",
    "vllm.renderers.base:BaseRenderer._resources",
    f"{_SCHEDULER}.encoder_cache_mismatch_reqs",
    f"{_SCHEDULER}.need_mamba_block_aligned_split",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks",
    f"{_LOGGER}._counter_cls",
    f"{_LOGGER}.per_engine_labelvalues",
    "vllm.config.lora:LoRAConfig.target_modules",
    "vllm.lora.model_manager:LoRAModelManager.packed_modules",
)

_ENGINES, _SERVERS = "tests/serving/engines", "tests/serving/servers"
_RELIABILITY = "tests/serving/reliability"
# The first name of a seam -> files and folders of the tests that fail without it.
SHOWN_BY: dict[str, tuple[str, ...]] = {
    "InputProcessor.__init__": (
        f"{_ENGINES}/test_options_in_slots.py",
        f"{_SERVERS}/test_mistakes.py",
    ),
    "AsyncLLM.add_request": (
        f"{_SERVERS}/test_structured.py",
        f"{_SERVERS}/test_constraint_options.py",
    ),
    "BaseServing._check_model": (f"{_SERVERS}/test_refusals.py",),
    "ParserManager.get_parser": (f"{_SERVERS}/test_agent_streams.py",),
    "init_exception_handler": (f"{_SERVERS}/test_refused_streams.py",),
    "BeamSearchOfflineMixin.beam_search": (f"{_ENGINES}/test_gemma.py",),
    "OutputProcessor.process_outputs": (f"{_ENGINES}/test_traces.py", f"{_SERVERS}/test_traces.py"),
    "FastIncrementalDetokenizer.__init__": ("tests/vllm_seams/test_detokenizer.py",),
    "StatLoggerManager.__init__": (f"{_SERVERS}/test_metrics.py",),
    "EngineArgs._set_default_max_num_seqs_and_batched_tokens_args": (f"{_ENGINES}/test_limits.py",),
    "MultiprocExecutor._init_executor": (f"{_RELIABILITY}/test_ending.py",),
    "GPUModelRunner.finish_requests": (f"{_RELIABILITY}/test_preempted_streams.py",),
    "StructuredOutputsWorker.__init__": ("tests/vllm_seams/test_runner.py",),
    "SamplerOutput.num_nans": (
        "tests/vllm_seams/test_channels.py",
        f"{_RELIABILITY}/test_poison.py",
    ),
    "SamplerOutput.logprobs_tensors": (f"{_ENGINES}/test_trace_logprobs.py",),
    "EngineCoreOutput.new_sampling_mask": (f"{_ENGINES}/test_traces.py",),
    "SchedulerStats.num_kv_fetch_reqs_by_stage": (f"{_SERVERS}/test_metrics.py",),
    "InputProcessor.process_inputs": (f"{_ENGINES}/test_options_in_slots.py",),
    "BaseRenderer._resources": (f"{_ENGINES}/test_closed_engines.py",),
    "Scheduler.encoder_cache_mismatch_reqs": (f"{_RELIABILITY}/test_poison.py",),
    "Scheduler._mamba_block_aligned_split": (
        f"{_ENGINES}/test_shapes.py",
        f"{_ENGINES}/test_limits.py",
    ),
    "KVCacheManager.cache_blocks": (f"{_RELIABILITY}/test_prefix_caching.py",),
    "PrometheusStatLogger._counter_cls": (f"{_SERVERS}/test_metrics.py",),
    "LoRAConfig.target_modules": (f"{_ENGINES}/test_lora.py",),
    "vllm.v1.worker.gpu.model_states": (f"{_ENGINES}/test_golden.py", "tests/serving/cuda_paths"),
    "vllm.v1.core.sched": (f"{_RELIABILITY}/test_lifecycle.py", f"{_ENGINES}/test_two_blocks.py"),
    "vllm.v1.attention": ("tests/attention", f"{_ENGINES}/test_triton_kernels.py"),
    "vllm.model_executor": (
        f"{_ENGINES}/test_golden.py",
        f"{_ENGINES}/test_gemma.py",
        f"{_ENGINES}/test_families.py",
    ),
    "vllm.multimodal": (f"{_ENGINES}/test_pictures.py",),
    "vllm.distributed.kv_transfer": (f"{_ENGINES}/test_kv_transfer.py",),
    "vllm.parser": (f"{_SERVERS}/test_agent_streams.py",),
    "vllm.sampling_params": (f"{_ENGINES}/test_sampling.py",),
    "vllm.exceptions": (f"{_SERVERS}/test_refusals.py",),
    "vllm.v1.metrics": (f"{_SERVERS}/test_metrics.py",),
}


@dataclass(frozen=True)
class Seam:
    """A row of the page.

    Attributes:
        names: what its first cell names.
        line: the row.
    """

    names: tuple[str, ...]
    line: str

    def covers(self, called: str) -> bool:
        """Whether a recorded name (``module:Class.method``) belongs to this seam."""
        module, _, name = called.partition(":")
        return any(name == each or f"{module}.".startswith(f"{each}.") for each in self.names)

    @property
    def tests(self) -> tuple[str, ...]:
        """Files and folders of the tests that fail without it."""
        return SHOWN_BY[self.names[0]]


def seams(page: str) -> list[Seam]:
    """The rows of the page's tables, in its order."""
    rows = re.findall(r"^\| `.*$", page, re.MULTILINE)
    return [Seam(tuple(re.findall("`(.*?)`", row.split("|")[1])), row) for row in rows]


def by_seam(page: str, names: Iterable[str]) -> tuple[dict[Seam, list[str]], list[str]]:
    """The recorded names of each seam, and those of none; a name belongs to its first row."""
    rows = seams(page)
    found: dict[Seam, list[str]] = {seam: [] for seam in rows}
    without: list[str] = []
    for name in names:
        seam = next((seam for seam in rows if seam.covers(name)), None)
        (without if seam is None else found[seam]).append(name)
    return found, without


def with_releases(page: str, record: dict[str, Any]) -> str:
    """The page with the releases of vLLM that each seam was tried with, in its last column.

    Args:
        page: the text of ``docs/seams.md``.
        record: the content of ``signatures.json``.
    """
    signatures = {
        name: found
        for group, names in record.items()
        if group != "releases"
        for name, found in names.items()
    }
    for seam, names in by_seam(page, signatures)[0].items():
        tried = _tried_with([signatures[name] for name in names], record["releases"])
        *cells, _, end = seam.line.split("|")
        page = page.replace(seam.line, "|".join([*cells, f" {tried} ", end]))
    return page


def _tried_with(signatures: Sequence[str | dict[str, str]], releases: Sequence[str]) -> str:
    """The releases that have all of these, for a cell of the page."""
    differ = [found for found in signatures if isinstance(found, dict)]
    have = [release for release in releases if all(release in found for found in differ)]
    return ", ".join(have) + " (changed)" * bool(differ) if signatures else "-"
