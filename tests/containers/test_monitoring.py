"""Compose file, Prometheus's configuration and the dashboard agree with each other.

That a real server has the metrics of the dashboard is tested in `tests/serving/servers`.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.support.dashboard import MONITORING, expressions, labels_by_metric

COMPOSE = yaml.safe_load((MONITORING / "compose.yaml").read_text("utf-8"))
SERVICES = COMPOSE["services"]
PROMETHEUS = yaml.safe_load((MONITORING / "prometheus.yml").read_text("utf-8"))
PROVISIONING = MONITORING / "grafana" / "provisioning"


def provisioned(name: str) -> dict[str, Any]:
    (file,) = (PROVISIONING / name).glob("*.yaml")
    return yaml.safe_load(file.read_text("utf-8"))


def mounts(service: str) -> dict[str, str]:
    """Path in the container -> what is mounted there."""
    volumes = (volume.split(":") for volume in SERVICES[service]["volumes"])
    return {target: source for source, target, *_ in volumes}


def listens(address: str) -> bool:
    """Whether a service of the compose file has this host and port."""
    host, port = address.removeprefix("http://").split(":")
    return any(line.endswith(f":{port}") for line in SERVICES[host]["ports"])


def test_the_files_of_the_services_exist() -> None:
    """Ports are published on loopback only, and nobody edits Grafana."""
    build = SERVICES["server"]["build"]
    assert (MONITORING / build["context"] / build["dockerfile"]).is_file()
    for service in ("prometheus", "grafana"):
        for source in mounts(service).values():
            assert source in COMPOSE["volumes"] or (MONITORING / source).exists()
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert SERVICES["grafana"]["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_services_find_each_other() -> None:
    (provider,) = provisioned("dashboards")["providers"]
    folder = provider["options"]["path"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(folder + "/")
    assert (MONITORING / mounts("grafana")[folder] / home.rpartition("/")[2]).is_file()
    (source,) = provisioned("datasources")["datasources"]
    assert listens(source["url"])
    # A rate over less than four scrapes is a gap.
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
    (job,) = PROMETHEUS["scrape_configs"]
    ((target,),) = (config["targets"] for config in job["static_configs"])
    assert listens(target)


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_an_expression_is_promql(title: str, expression: str) -> None:
    assert "$" not in expression, "a variable that tests.support.dashboard does not know"
    assert labels_by_metric(expression)
