"""Child processes of test_bridge: each scenario needs a process in which nothing was bridged yet.

Usage: bridge_scenarios.py NAME [DIRECTORY]. The result is one line of JSON on stdout.
"""

import importlib
import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_dllm.cpu import bridge, torchvision_schemas, unusable_modules
from vllm_dllm.vllm_patches import cpu_platform
from vllm_dllm.vllm_patches.wrapping import is_wrapped

# Stands in for a diffusion model; LlamaForCausalLM for every other one.
BRIDGED = "Qwen2ForCausalLM"
FORCE = "VLLM_USE_V2_MODEL_RUNNER"


def is_bridged_model(config: Any) -> bool:
    """Answer for the plugin."""
    return BRIDGED in config.model_config.architectures


def make_config(directory: Path, architecture: str, **parallel: Any) -> Any:
    """A complete VllmConfig for a tiny model without weights."""
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

    kind = architecture.removesuffix("ForCausalLM").lower()
    path = directory / kind
    path.mkdir(exist_ok=True)
    config = {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "vocab_size": 64,
    }
    (path / "config.json").write_text(json.dumps(config))
    model = ModelConfig(model=str(path), skip_tokenizer_init=True, dtype="float32")
    return VllmConfig(model_config=model, parallel_config=ParallelConfig(**parallel))


def attempt(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Result of a call, or the last line of its error."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # the scenario reports whatever came
        return f"{type(error).__name__}: {error}"


def choice(directory: Path, architecture: str, **parallel: Any) -> Any:
    """Whether a new configuration takes Model Runner V2, or why it is refused."""
    config = attempt(make_config, directory, architecture, **parallel)
    return config if isinstance(config, str) else config.use_v2_model_runner


def runner(directory: Path) -> dict[str, Any]:
    """Install twice and read the runner choice of bridged and ordinary models."""
    expected = bridge.bridged_parts()
    untouched = not torchvision_schemas.declared() and "vllm.config" not in sys.modules
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    cpu_platform.logger.setLevel(logging.INFO)
    cpu_platform.logger.addHandler(handler)
    parts = cpu_platform.apply(is_bridged_model)
    again = cpu_platform.apply(lambda config: True)

    import torchvision
    from vllm.config import VllmConfig
    from vllm.triton_utils import triton

    out = {
        "expected": expected,
        "untouched": untouched,
        "parts": parts,
        "again": again,
        "log": lines,
        "torchvision": bool(torchvision.__version__),
        "schemas": torchvision_schemas.declared(),
        "worker_imported": "vllm.v1.worker.cpu_worker" in sys.modules,
        "next_power_of_2": [triton.next_power_of_2(n) for n in (1, 5, 32)],
        "forced_by_us": os.environ.get(FORCE),
        "no_model": VllmConfig().use_v2_model_runner,
    }
    for value in (None, "0", "1"):
        if value is not None:
            os.environ[FORCE] = value
        out[f"bridged_{value}"] = choice(directory, BRIDGED)
        out[f"ordinary_{value}"] = choice(directory, "LlamaForCausalLM")
    del os.environ[FORCE]
    out["unsupported"] = attempt(unsupported, directory)
    return out


def unsupported(directory: Path) -> None:
    """Check a bridged configuration in which Model Runner V2 lacks a feature."""
    config = make_config(directory, BRIDGED)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    config.parallel_config.pipeline_parallel_size = 2
    config._validate_v2_model_runner()


def worker(directory: Path) -> dict[str, Any]:
    """Follow vLLM's worker start up to the swap of the kernels."""
    cpu_platform.apply(is_bridged_model)
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()  # as WorkerWrapperBase.init_worker does
    current_platform.register_triton_kernel_overrides()
    from vllm.v1.worker.cpu_worker import CPUWorker

    from vllm_dllm.cpu.launch import STAND_INS, KernelStandIn, swap_kernels

    def swapped() -> int:
        holders = [
            getattr(sys.modules[f"vllm.v1.worker.gpu.{module}"], name)
            for module, name in (path.rsplit(".", 1) for path in STAND_INS)
            if f"vllm.v1.worker.gpu.{module}" in sys.modules
        ]
        return sum(isinstance(kernel, KernelStandIn) for kernel in holders)

    import vllm.v1.worker.gpu.input_batch as input_batch

    # A module that copied a kernel by name before the swap.
    copy = sys.modules["copied_kernel"] = type(sys)("copied_kernel")
    copy.kernel = input_batch._post_update_kernel
    out: dict[str, Any] = {"before": swapped()}
    # Without a distributed address the stock method stops early, after the swap.
    out["stock_v1"] = attempt(CPUWorker.init_device, SimpleNamespace(use_v2_model_runner=False))
    out["after_v1"] = swapped()
    out["stock_v2"] = attempt(CPUWorker.init_device, SimpleNamespace(use_v2_model_runner=True))
    out["after_v2"] = swapped()
    out["copy"] = copy.kernel is input_batch._post_update_kernel
    first = input_batch._post_update_kernel
    out["count"], out["same"] = swap_kernels(), first is input_batch._post_update_kernel
    out["wrapped_once"] = not hasattr(CPUWorker.init_device.__wrapped__, "__wrapped__")
    import vllm.v1.worker.cpu.model_runner  # noqa: F401

    out["runner_imports"] = True
    return out


def elsewhere(directory: Path) -> dict[str, Any]:
    """Pretend that vLLM's platform is not the CPU."""
    from vllm.platforms import current_platform

    type(current_platform).is_cpu = lambda self: False
    parts, words = cpu_platform.apply(is_bridged_model), bridge.bridged_parts()
    out = {"parts": parts, "words": words, "schemas": torchvision_schemas.declared()}
    # Only so that the configuration can be imported here at all.
    torchvision_schemas.declare()
    unusable_modules.hide()
    from vllm.config import VllmConfig
    from vllm.triton_utils import triton

    out["choice"] = is_wrapped(VllmConfig, "use_v2_model_runner")
    out["check"] = is_wrapped(VllmConfig, "_validate_v2_model_runner")
    out["hook"] = is_wrapped(type(current_platform), "register_triton_kernel_overrides")
    out["triton"] = hasattr(triton, "next_power_of_2")
    return out


def real_triton(directory: Path) -> dict[str, Any]:
    """Install where vLLM has a Triton that works."""
    parts = cpu_platform.apply(is_bridged_model)
    from vllm.config import VllmConfig

    return {
        "parts": parts,
        "choice": is_wrapped(VllmConfig, "use_v2_model_runner"),
    }


def early(directory: Path) -> dict[str, Any]:
    """Begin as a user's script does, with the hook that Python runs when it starts."""
    sys.modules.pop("vllm_dllm.cpu.import_hook", None)
    importlib.import_module("vllm_dllm.cpu.import_hook")
    from vllm import LLM

    return {"llm": LLM.__name__, "schemas": torchvision_schemas.declared()}


if __name__ == "__main__":
    # A CPU installation may declare the schemas when Python starts. Here the package has to manage
    # without, and would else be tested against that.
    sys.meta_path[:] = [f for f in sys.meta_path if "import_hook" not in type(f).__module__]
    scenario = {f.__name__: f for f in (runner, worker, elsewhere, real_triton, early)}
    print(json.dumps(scenario[sys.argv[1]](Path(sys.argv[2]))))
