"""Where decoding algorithms of other packages import their settings from."""

from vllm_dllm.settings.ranges import AlgorithmConfig, Range, SettingsError, setting

__all__ = ["AlgorithmConfig", "Range", "SettingsError", "setting"]
