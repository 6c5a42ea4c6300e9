"""Where the live page would show a part of the requests, the server does not start."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module

import pytest

from vllm_dllm.ranges import SettingsError
from vllm_dllm.startup.live_page import LIVE_PAGE, refuse_several_servers


def args(middleware: list[str], api_servers: int | None, replicas: int) -> Namespace:
    return Namespace(
        middleware=middleware, api_server_count=api_servers, data_parallel_size=replicas
    )


@pytest.mark.parametrize(
    ("api_servers", "replicas", "named"),
    [
        (2, 1, "--api-server-count 2"),
        (1, 2, "--data-parallel-size 2"),
        (None, 4, "--data-parallel-size 4"),
    ],
)
def test_a_half_view_is_refused(api_servers: int | None, replicas: int, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        refuse_several_servers(args(["other.Thing", LIVE_PAGE], api_servers, replicas))
    refuse_several_servers(args(["other.Thing"], api_servers, replicas))


@pytest.mark.parametrize("api_servers", [None, 1, 0])
def test_one_server_of_one_engine(api_servers: int | None) -> None:
    refuse_several_servers(args([LIVE_PAGE], api_servers, 1))


def test_the_name_is_that_of_the_class() -> None:
    module, _, name = LIVE_PAGE.rpartition(".")
    assert hasattr(import_module(module), name)
