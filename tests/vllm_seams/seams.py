"""The seams that ``docs/seams.md`` lists, and what of vLLM each is.

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
