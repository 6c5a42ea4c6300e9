"""The name of the live page's middleware is that of its class."""

from __future__ import annotations

from importlib import import_module

from vllm_dllm.startup.live_page import LIVE_PAGE


def test_the_name_is_that_of_the_class() -> None:
    module, _, name = LIVE_PAGE.rpartition(".")
    assert hasattr(import_module(module), name)
