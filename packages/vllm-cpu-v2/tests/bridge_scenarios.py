"""Child processes of test_bridge: each scenario needs a process in which nothing was bridged yet.

Usage: bridge_scenarios.py NAME [DIRECTORY]. The result is one line of JSON on stdout.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

# Python runs it when it starts, where the distribution is installed with its .pth file.
import vllm_cpu_v2.import_hook  # noqa: F401
from vllm_cpu_v2 import plugin

# Stands in for a diffusion model, by a field of its config.json; LlamaForCausalLM for every other.
BRIDGED = "Qwen2ForCausalLM"
FORCE = "VLLM_USE_V2_MODEL_RUNNER"


def make_config(
    directory: Path, architecture: str, asynchronous: bool | None = None, **parallel: Any
) -> Any:
    """A complete VllmConfig for a tiny model without weights."""
    from vllm.config import ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig

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
    if architecture == BRIDGED:
        config["canvas_length"] = 16
    (path / "config.json").write_text(json.dumps(config))
    model = ModelConfig(
        model=str(path), skip_tokenizer_init=True, dtype="float32", enforce_eager=True
    )
    scheduler = SchedulerConfig(
        max_model_len=128, is_encoder_decoder=False, async_scheduling=asynchronous
    )
    return VllmConfig(
        model_config=model, scheduler_config=scheduler, parallel_config=ParallelConfig(**parallel)
    )


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
    """Install and read the runner choice of bridged and ordinary models."""
    untouched = "vllm.config" not in sys.modules
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    plugin.logger.setLevel(logging.INFO)
    plugin.logger.addHandler(handler)
    plugin.register()
    parts = plugin.parts()

    import torchvision
    from vllm.config import VllmConfig
    from vllm.triton_utils import triton

    out = {
        "untouched": untouched,
        "parts": parts,
        "log": lines,
        "torchvision": bool(torchvision.__version__),
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
    return out | worker(directory)


def unsupported(directory: Path) -> None:
    """Check a bridged configuration in which Model Runner V2 lacks a feature."""
    config = make_config(directory, BRIDGED)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    config.parallel_config.pipeline_parallel_size = 2
    config._validate_v2_model_runner()


def worker(directory: Path) -> dict[str, Any]:
    """Follow vLLM's worker start up to the swap of the kernels, behind `runner`."""
    # As `WorkerWrapperBase.init_worker` does, after it has loaded plugins.
    from vllm_cpu_v2.launch import STAND_INS, KernelStandIn, swap_kernels
    from vllm_cpu_v2.worker import CpuV2Worker

    def swapped() -> int:
        holders = [
            getattr(sys.modules[f"vllm.v1.worker.gpu.{module}"], f"_{function.__name__}_kernel")
            for module, functions in STAND_INS.items()
            if f"vllm.v1.worker.gpu.{module}" in sys.modules
            for function in functions
        ]
        return sum(isinstance(kernel, KernelStandIn) for kernel in holders)

    import vllm.v1.worker.gpu.input_batch as input_batch

    out: dict[str, Any] = {"before": swapped()}
    # Without a distributed address vLLM's method stops early, after the swap.
    started = object.__new__(CpuV2Worker)
    started.vllm_config = make_config(directory, BRIDGED)
    out["stopped"] = attempt(started.init_device)
    out["after"] = swapped()
    first = input_batch._post_update_kernel
    swap_kernels()
    out["same"] = first is input_batch._post_update_kernel
    import vllm.v1.worker.cpu.model_runner  # noqa: F401

    out["runner_imports"] = True
    return out


def choices(directory: Path) -> dict[str, Any]:
    """What the platform settles for a bridged and for an ordinary model."""
    plugin.register()
    from vllm import LLM
    from vllm.platforms import current_platform
    from vllm.v1.engine import utils

    out: dict[str, Any] = {"platform": type(current_platform).__name__, "llm": LLM.__name__}
    for name, architecture in (("ordinary", "LlamaForCausalLM"), ("bridged", BRIDGED)):
        for asked in (None, False, True):
            config = make_config(directory, architecture, asynchronous=asked)
            out[f"{name}_{asked}"] = config.scheduler_config.async_scheduling
        out[f"{name}_worker"] = config.parallel_config.worker_cls
        out[f"{name}_norms"] = config.kernel_config.ir_op_priority.rms_norm
        out[f"{name}_forked"] = ours(utils.get_mp_context)
    return out


def elsewhere(directory: Path) -> dict[str, Any]:
    """Begin as a user's script does, then pretend that vLLM's platform is not the CPU."""
    from vllm import LLM
    from vllm.platforms import current_platform

    type(current_platform).is_cpu = lambda self: False
    plugin.register()
    parts = plugin.parts()
    out = {"llm": LLM.__name__, "parts": parts}
    from vllm.config import VllmConfig
    from vllm.triton_utils import triton

    out["choice"] = ours(VllmConfig.use_v2_model_runner.fget)
    out["check"] = ours(VllmConfig._validate_v2_model_runner)
    out["triton"] = hasattr(triton, "next_power_of_2")
    return out


def ours(function: Any) -> bool:
    """Whether a function has taken the place of vLLM's."""
    return str(function.__module__).startswith("vllm_cpu_v2")


if __name__ == "__main__":
    scenario = {f.__name__: f for f in (runner, choices, elsewhere)}
    print(json.dumps(scenario[sys.argv[1]](Path(sys.argv[2]))))
