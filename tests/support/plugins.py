"""Small distributions with a plugin of vLLM's, for PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

FAILS = "def register():\n    raise RuntimeError('boom')\n"
# What vllm-project/dllm-plugin does: it registers a class of its own for LLaDA2, unless there is
# one, and lets LLaDA2's configurations ask for attention that is not causal.
OTHER_DLLM = """
def register():
    from vllm import ModelRegistry
    from vllm.config import VllmConfig

    if "LLaDA2MoeModelLM" not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model("LLaDA2MoeModelLM", "no_such_module:LLaDA2")
    original = VllmConfig.__post_init__

    def post_init(self):
        original(self)
        if self.model_config and "LLaDA2MoeModelLM" in self.model_config.architectures:
            self.attention_config.use_non_causal = True

    VllmConfig.__post_init__ = post_init
"""


def distribution(place: Path, name: str, plugin: str, source: str) -> str:
    """Write an installed distribution; returns the folder, for PYTHONPATH.

    `plugin` is its name in the group ``vllm.general_plugins``; `source` has its ``register``.
    """
    module = name.replace("-", "_")
    information = place / f"{module}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{plugin} = {module}:register\n"
    )
    (place / f"{module}.py").write_text(source)
    return str(place)
