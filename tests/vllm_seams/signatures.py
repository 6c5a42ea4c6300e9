"""What this package relies on in vLLM: names that it wraps, overrides, inherits from or reads.

    .venv/bin/python -m tests.vllm_seams.signatures

writes their signatures in the installed vLLM to ``signatures.json``, which `test_signatures`
compares, and the releases with which each seam was tried to ``docs/seams.md``. Names that are
wrapped are those of the newest record: write a new one there, with any signature.

`scripts/versions.sh` runs it with ``--broken``: it then prints which names have changed since the
newest release that is recorded, without an engine; its status is 1 if any has.

A seam is a row of one of the tables of ``docs/seams.md``. Its first cell names functions and fields
of vLLM by what follows the module, or packages of vLLM with all names in them that are recorded.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.checkpoints import ROOT
from vllm_dllm.vllm_seams import versions

PACKAGE = ROOT / "vllm_dllm"
PAGE = ROOT / "docs" / "seams.md"
RECORD = Path(__file__).with_name("signatures.json")
MISSING = "missing"
# Group -> name -> signature.
Names = dict[str, dict[str, str]]

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
    "vllm.renderers.base:BaseRenderer.mm_processor_cache",
    "vllm.multimodal.cache.base:BaseMultiModalProcessorCache.invalidate",
    f"{_SCHEDULER}.encoder_cache_mismatch_reqs",
    f"{_SCHEDULER}.need_mamba_block_aligned_split",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks",
    f"{_LOGGER}._counter_cls",
    f"{_LOGGER}.per_engine_labelvalues",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.cudagraph_manager",
    "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.dispatch",
    "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.run_fullgraph",
    "vllm.config.lora:LoRAConfig.target_modules",
    "vllm.lora.model_manager:LoRAModelManager.packed_modules",
    # Releases have these in different packages.
    *(
        f"vllm.entrypoints.{package}.{name}"
        for package in ("generate.structured_decisions", "openai.decisions")
        for name in (
            *("strategies:READ_STRATEGIES", "strategies:LOGPROBS_MODES", "strategies:prompt_tail"),
            *("strategies:reply_label_ids", "question_types:QUESTION_TYPES"),
        )
    ),
)


@dataclass(frozen=True)
class Seam:
    """A row of the page, and what its first cell names."""

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


def relied_on(wrapped: Iterable[str]) -> Names:
    """The signature of each name: ``wrapped``, ``overridden``, ``inherited`` and ``used``."""
    found: Names = {"overridden": {}, "inherited": {}}
    found["wrapped"] = {name: signature_of(name) for name in wrapped}
    found["used"] = {name: signature_of(name) for name in USED}
    # Of single objects, see `vllm_seams.request_entry`.
    replaced = "vllm.v1.engine.input_processor:InputProcessor.process_inputs"
    found["overridden"][replaced] = signature_of(replaced)
    for own, base in sorted(set(_subclasses()), key=str):
        called = f"{base.__module__}:{base.__qualname__}"
        found["inherited"][f"{called}.__init__"] = signature(base, "__init__")
        for name in vars(own).keys() & vars(base).keys():
            if callable(getattr(base, name)) and not name.startswith("__"):
                found["overridden"][f"{called}.{name}"] = signature(base, name)
    # A class that vLLM makes in a function is not found by its name; its bases are.
    return {
        group: {name: names[name] for name in sorted(names) if signature_of(name) != MISSING}
        for group, names in sorted(found.items())
    }


def checked(wrapped: list[str]) -> Iterator[Any]:
    """What is relied on, and the imports that are missing; in a process that starts no engine."""
    yield relied_on(wrapped)
    yield missing_imports()


def wraps() -> set[str]:
    """The last parts of the names in this package's calls of `wrapping.wrap`."""
    calls = [
        node
        for path in (PACKAGE / "vllm_seams").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "wrap"
    ]
    names = [call.args[1] for call in calls]
    return {name.value for name in names if isinstance(name, ast.Constant)}


def _subclasses() -> Iterator[tuple[type, type]]:
    """The classes of this package, each with every class of vLLM that it inherits from."""
    import vllm_dllm

    for module in pkgutil.walk_packages(vllm_dllm.__path__, "vllm_dllm."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and value.__module__ == module.name:
                above = (base for base in value.__mro__ if base.__module__.startswith("vllm."))
                yield from ((value, base) for base in above)


def missing_imports() -> list[str]:
    """What this package imports from vLLM, also inside functions, and vLLM does not have."""
    missing = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    try:
                        module = importlib.import_module(node.module)
                        if not hasattr(module, alias.name):
                            importlib.import_module(f"{node.module}.{alias.name}")
                    except ImportError as error:
                        missing.append(f"{path.relative_to(PACKAGE)}: {error}")
    return missing


def signature_of(called: str) -> str:
    """The signature of a name as the record has it, or `MISSING`; it needs no engine."""
    module, _, path = called.partition(":")
    *owners, name = path.split(".")
    try:
        owner = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        return signature(owner, name)
    except (ImportError, AttributeError):
        return MISSING


def signature(owner: Any, name: str) -> str:
    """The parameters without types and default values: their names, kinds and order.

    Of what is no function: ``field`` of a message, or ``attribute`` that methods set.

    Raises:
        AttributeError: there is no such name.
    """
    if isinstance(owner, type):
        if any(name in vars(base).get("__annotations__", {}) for base in owner.__mro__):
            return "field"
        if not hasattr(owner, name) and f"self.{name}" in inspect.getsource(owner):
            return "attribute"
    attribute = getattr(owner, name)
    if not callable(attribute):
        return type(attribute).__name__
    parameters = [
        parameter.replace(
            annotation=parameter.empty,
            default=parameter.empty if parameter.default is parameter.empty else _Default(),
        )
        for parameter in inspect.signature(attribute).parameters.values()
    ]
    return str(inspect.Signature(parameters))


class _Default:
    def __repr__(self) -> str:
        return "..."


def installed() -> str:
    """The first two numbers of the installed vLLM's version, such as ``0.32``."""
    return ".".join((versions.vllm_version() or "").split(".")[:2])


def with_releases(page: str, record: dict[str, Names]) -> str:
    """The page with the releases of vLLM that each seam was tried with, in its last column."""
    signatures = {release: flat(names) for release, names in record.items()}
    every = sorted({name for names in signatures.values() for name in names})
    for seam, names in by_seam(page, every)[0].items():
        tried = _tried_with(names, signatures)
        *cells, _, end = seam.line.split("|")
        page = page.replace(seam.line, "|".join([*cells, f" {tried} ", end]))
    return page


def _tried_with(names: Sequence[str], signatures: dict[str, dict[str, str]]) -> str:
    """The releases that have all of these names, for a cell of the page."""
    have = [release for release, known in signatures.items() if known.keys() >= set(names)]
    differ = len({tuple(map(known.get, names)) for known in signatures.values()}) > 1
    return ", ".join(have) + " (changed)" * differ if names else "-"


def flat(names: Names) -> dict[str, str]:
    """The signature of each name of all groups."""
    return {name: found for group in names.values() for name, found in group.items()}


def changes(record: dict[str, Names]) -> list[str]:
    """The names that are not as in the newest release that is recorded, by seam."""
    known = flat(record.get(installed()) or list(record.values())[-1])
    changed = {
        name: f"{now}, was {before}"
        for name, before in known.items()
        if (now := signature_of(name)) != before
    }
    found, without = by_seam(PAGE.read_text("utf-8"), changed)
    groups = [(", ".join(seam.names), names) for seam, names in found.items()]
    groups.append(("of no seam", without))
    return [f"{title}: {name}: {changed[name]}" for title, names in groups for name in names]


if __name__ == "__main__":
    record = json.loads(RECORD.read_text())
    if sys.argv[1:] == ["--broken"]:
        lines = [f"missing: {missing}" for missing in missing_imports()] + changes(record)
        print(f"== what broke with vLLM {installed()}, by seam of docs/seams.md")
        print("\n".join(lines or ["nothing but the tests that failed"]))
        sys.exit(bool(lines))
    newest = record.get(installed()) or list(record.values())[-1]
    record[installed()] = relied_on(newest["wrapped"])
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(with_releases(PAGE.read_text("utf-8"), record), "utf-8")
    print(f"missing: {missing_imports()}")
