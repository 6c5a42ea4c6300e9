"""``vllm-dllm check``: report what is installed and whether it works."""

from __future__ import annotations

import sys

from vllm_dllm import __version__
from vllm_dllm.commands import installation, show_config
from vllm_dllm.commands.local_server import TINY
from vllm_dllm.vllm_seams import versions


def run() -> int:
    """Print what is installed; return 1, and say why, if ``vllm serve`` would fail."""
    print(f"vllm-dllm      {__version__}")
    version = versions.vllm_version() or "not installed"
    print(f"vllm           {version} (supported: {versions.supported_versions()})")
    for release, how in versions.TESTED.items():
        print(f"  tested {release}  {how}")
    try:
        for name, value in _found_by_trying().items():
            print(f"{name:13}  {value}")
    except Exception as error:
        print(f"cannot serve: {show_config.reason(error)}", file=sys.stderr)
        return 1
    print("ready: vllm serve MODEL")
    return 0


def _found_by_trying() -> dict[str, str]:
    """Go as far as ``vllm serve`` goes before it loads weights; return what is found, as text."""
    installation.load("ERROR")

    import vllm._custom_ops  # noqa: F401
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    from vllm_dllm.families import registry

    show_config.explain([str(TINY / "tiny-llada2"), "--enforce-eager"])
    without_triton = "torch (no Triton here: dllm.kernels=triton and attention CUSTOM are refused)"
    return {
        "platform": f"{current_platform.device_type} ({current_platform.get_device_name()})",
        "bridged": _bridged(),
        "kernels": "torch, triton; attention CUSTOM" if HAS_TRITON else without_triton,
        "architectures": ", ".join(registry.served_architectures()),
    }


def _bridged() -> str:
    """List the parts that ``vllm-cpu-v2`` adds to vLLM's CPU build here, as text."""
    try:
        from vllm_cpu_v2.plugin import parts
    except ImportError:
        return "nothing (vllm-cpu-v2 is not installed; machines without a GPU need it)"
    return ", ".join(parts()) or "nothing"
