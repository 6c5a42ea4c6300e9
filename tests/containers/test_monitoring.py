"""Compose file, Prometheus's configuration and the dashboard agree with each other.

That a real server has the metrics of the dashboard is tested in `tests/serving/servers`.
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import pytest
import yaml

from tests.support.dashboard import DASHBOARD, MONITORING, PANELS, expressions, labels_by_metric

COMPOSE = yaml.safe_load((MONITORING / "compose.yaml").read_text("utf-8"))
SERVICES = COMPOSE["services"]
PROMETHEUS = yaml.safe_load((MONITORING / "prometheus.yml").read_text("utf-8"))
GRAFANA = SERVICES["grafana"]["environment"]
PROVISIONING = MONITORING / "grafana" / "provisioning"


def provisioned(name: str) -> dict[str, Any]:
    (file,) = (PROVISIONING / name).glob("*.yaml")
    return yaml.safe_load(file.read_text("utf-8"))


def mounts(service: str) -> dict[str, str]:
    """Path in the container -> what is mounted there."""
    return {
        target: source
        for source, target, *_ in (volume.split(":") for volume in SERVICES[service]["volumes"])
    }


@pytest.mark.parametrize("service", [name for name in SERVICES if "build" not in SERVICES[name]])
def test_images_are_pinned(service: str) -> None:
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", SERVICES[service]["image"])


@pytest.mark.parametrize("service", SERVICES)
def test_ports_are_published_on_loopback_only(service: str) -> None:
    assert SERVICES[service]["ports"]
    for port in SERVICES[service]["ports"]:
        assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("service", ["prometheus", "grafana"])
def test_what_is_mounted_exists(service: str) -> None:
    for source in mounts(service).values():
        assert source in COMPOSE["volumes"] or (MONITORING / source).exists()


def test_the_server_is_built_from_this_repository() -> None:
    build = SERVICES["server"]["build"]
    assert (MONITORING / build["context"] / build["dockerfile"]).is_file()


def test_grafana_is_for_looking_only() -> None:
    """Whoever reaches the port sees the dashboard; there is no account, so no password."""
    assert GRAFANA["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert GRAFANA["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert GRAFANA["GF_AUTH_BASIC_ENABLED"] == "false"
    assert GRAFANA["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert GRAFANA["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert not any("PASSWORD" in name for name in GRAFANA)


def test_grafana_finds_dashboard_and_data_source() -> None:
    (provider,) = provisioned("dashboards")["providers"]
    folder = MONITORING / mounts("grafana")[provider["options"]["path"]]
    home = GRAFANA["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"] + "/")
    assert (folder / home.rpartition("/")[2]).is_file()

    (source,) = provisioned("datasources")["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert any(line.endswith(f":{port}") for line in SERVICES[host]["ports"])
    # A rate over less than four scrapes is a gap.
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]


def test_prometheus_scrapes_the_server() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    ((target,),) = (config["targets"] for config in job["static_configs"])
    host, port = target.split(":")
    assert any(line.endswith(f":{port}") for line in SERVICES[host]["ports"])


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert [target["refId"] for target in panel["targets"]] == ["A", "B", "C"][
        : len(panel["targets"])
    ]
    assert all(target["legendFormat"] for target in panel["targets"])


def test_panels_do_not_overlap() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for one, other in combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_an_expression_is_promql(title: str, expression: str) -> None:
    assert "$" not in expression, "a variable that tests.support.dashboard does not know"
    assert labels_by_metric(expression)


def test_labels_of_an_expression_are_found() -> None:
    """What the e2e tests rely on: a wrong name or label would not get past them."""
    assert labels_by_metric('sum by (a, le) (rate(x_total{b="1"}[1m])) / y') == {
        "x_total": {"a", "b", "le"},
        "y": set(),
    }
    with pytest.raises(ValueError):
        labels_by_metric("sum by (a (x)")
