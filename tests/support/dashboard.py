"""Dashboard and alerts of examples/monitoring, and which of their metrics a server has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.checkpoints import ROOT

MONITORING = ROOT / "examples" / "monitoring"
DASHBOARD = json.loads(
    (MONITORING / "grafana" / "dashboards" / "diffusion.json").read_text("utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# What Grafana puts in place of its variables before Prometheus sees an expression.
VARIABLES = {"$__rate_interval": "1m", "$model": ".*"}
RULES = [
    rule
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
# Prometheus adds these two to every sample that it scrapes, and a metric of its own.
SCRAPED, SCRAPE = {"instance", "job"}, "up"


def expressions() -> Iterator[tuple[str, str]]:
    """(a panel's title, PromQL) for every query of the dashboard, variables filled in."""
    for panel in PANELS:
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            yield panel["title"], expression


def alerts() -> Iterator[tuple[str, str]]:
    """(an alert's name, PromQL) for every alert."""
    for rule in RULES:
        yield rule["alert"], rule["expr"]


def labels_by_metric(expression: str) -> dict[str, set[str]]:
    """The metrics that PromQL reads, each with the labels that it matches or groups by."""
    found: dict[str, set[str]] = {}
    grouped: list[set[str]] = [set()]

    def enter(node: Any) -> None:
        if isinstance(node, promql_parser.AggregateExpr):
            labels = set(node.modifier.labels) if node.modifier else set()
            grouped.append(grouped[-1] | labels)
        if isinstance(node, promql_parser.VectorSelector):
            matched = {matcher.name for matcher in node.matchers.matchers}
            found.setdefault(node.name, set()).update(matched | grouped[-1])

    def leave(node: Any) -> None:
        if isinstance(node, promql_parser.AggregateExpr):
            grouped.pop()

    promql_parser.walk(promql_parser.parse(expression), enter, leave)
    return found


def missing_metrics(url: str) -> list[str]:
    """What dashboard and alerts ask for and the server at `url` does not have."""
    exposed: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=10).text):
        for sample in family.samples:
            exposed.setdefault(sample.name, set()).update(sample.labels)
    faults = []
    for title, expression in (*expressions(), *alerts()):
        for metric, labels in labels_by_metric(expression).items():
            if metric == SCRAPE:
                continue
            if metric not in exposed:
                faults.append(f"{title}: no metric {metric}")
            elif lacking := labels - exposed[metric] - SCRAPED:
                faults.append(f"{title}: {metric} has no label {sorted(lacking)}")
    return faults
