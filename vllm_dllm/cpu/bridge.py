"""The installation of the stand-ins in a process that serves from a CPU.

vLLM's Model Runner V2 needs Triton, which vLLM's CPU platform usually has not. There the process
gets, in this order:

- schemas of two operators, without which torchvision cannot be imported (`torchvision_schemas`),
  and no sight of modules whose libraries do not load (`unusable_modules`);
- vLLM's compiled norms as implementations of its operators (`norms`), with and without Triton;
- the one helper that the runner calls on the Triton placeholder outside kernels;
- in a worker, stand-ins for the runner's kernels (`launch`) and two collectives (`collectives`);
- in a worker with a quantized model, experts where vLLM has no kernel (`quantized_experts`);
- in a worker with LoRA, rows that belong to no adapter (`lora`).

`vllm_patches.cpu_platform` calls these functions at the right time.
"""

from __future__ import annotations

from vllm_dllm.cpu import norms, torchvision_schemas, unusable_modules


def on_cpu() -> bool:
    """Whether this vLLM serves from the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def lacks_triton() -> bool:
    """Whether vLLM has no Triton here, so that Model Runner V2 has no kernels."""
    from vllm.triton_utils import HAS_TRITON

    return not HAS_TRITON


def bridged_parts() -> tuple[str, ...]:
    """Short names of the parts that this process lacks and is given; changes nothing.

    For example ("v2-runner", "triton-kernels:13", "torchvision-schemas"); empty where nothing is
    missing, and on another platform. The result is the same before and after they are given.
    """
    if not on_cpu():
        return ()
    words: list[str] = []
    if lacks_triton():
        from vllm_dllm.cpu.launch import STAND_INS

        words += ["v2-runner", f"triton-kernels:{len(STAND_INS)}"]
    if torchvision_schemas.declared() or torchvision_schemas.missing():
        words.append("torchvision-schemas")
    return tuple(words)


def prepare_process() -> None:
    """Give any process of vLLM what it needs before it makes a configuration."""
    # First, because importing vLLM's configuration imports torchvision.
    torchvision_schemas.declare()
    unusable_modules.hide()
    # A configuration that prefers these norms reaches processes that did not make it.
    norms.register()
    if lacks_triton():
        _complete_triton_placeholder()


def swap_in_stand_ins() -> None:
    """Give a worker's process the kernels and the collectives that its runner calls."""
    from vllm_dllm.cpu.collectives import add_collectives
    from vllm_dllm.cpu.launch import swap_kernels

    swap_kernels()
    add_collectives()


def add_quantized_experts() -> None:
    """Let a worker's process make our quantized experts where it would make vLLM's."""
    # Not imported at the top: it imports vLLM's quantization, which other models do not need.
    from vllm_dllm.cpu import quantized_experts

    quantized_experts.install()


def _complete_triton_placeholder() -> None:
    """Give vLLM's placeholder for the module `triton` the helper that the runner asks it for."""
    from vllm.triton_utils import triton
    from vllm.triton_utils.importing import TritonPlaceholder
    from vllm.utils.math_utils import next_power_of_2

    if isinstance(triton, TritonPlaceholder) and not hasattr(triton, "next_power_of_2"):
        triton.next_power_of_2 = next_power_of_2
