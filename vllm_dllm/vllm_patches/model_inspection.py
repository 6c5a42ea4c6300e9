"""On the CPU a start looks at a model's class in its own process, and not in one of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dllm.families.registry import families
from vllm_dllm.vllm_patches.wrapping import wrap


def apply() -> None:
    """Spare the first start of a model a process that imports vLLM, which takes eight seconds.

    vLLM asks a class what it can do (images, pipelines) in another process, because importing it
    may initialize CUDA, and keeps the answer. On the CPU there is nothing to initialize, and the
    front end has imported all but the class itself.
    """
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    wrap(_LazyRegisteredModel, "inspect_model_cls", _in_this_process)


def _in_this_process(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def inspect_model_cls(self: Any) -> Any:
        from vllm.model_executor.models.registry import _ModelInfo
        from vllm.platforms import current_platform

        ours = {family.model_class for family in families().values()}
        if f"{self.module_name}:{self.class_name}" in ours and current_platform.is_cpu():
            return _ModelInfo.from_model_cls(self.load_model_cls())
        return original(self)

    return inspect_model_cls
