"""The manifests of examples/deploy fit the server, the images, the alerts and each other.

They are compared with what the server does and with the files of this repository. Kubernetes' own
schemas are not among the development tools: `make schemas` fetches them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import vllm_dllm
from tests.support.checkpoints import ROOT
from tests.support.dashboard import MONITORING, SCRAPED, alerts, labels_by_metric
from tests.support.documents.running import faults

FOLDER = ROOT / "examples" / "deploy"
RAY = FOLDER / "ray"
CUDA = (ROOT / "containers" / "cuda.Dockerfile").read_text("utf-8")
ENDING_S = 15  # what a server may need after its last answer


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def one(path: Path, kind: str) -> dict[str, Any]:
    (found,) = (document for document in documents(path) if document["kind"] == kind)
    return found


@dataclass
class Pod:
    """A pod that runs a server, put together as its controller would do it.

    Attributes:
        container: as in Kubernetes, with all of the server's arguments in `args`.
        grace_s: seconds between SIGTERM (or the hook before it) and SIGKILL.
    """

    container: dict[str, Any]
    security: dict[str, Any]
    grace_s: int

    def flag(self, name: str) -> str | None:
        given = [arg.split("=", 1)[1] for arg in self.container["args"] if arg.startswith(name)]
        return given[-1] if given else None


def kubernetes() -> Pod:
    spec = one(FOLDER / "kubernetes.yaml", "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    grace = spec["terminationGracePeriodSeconds"]
    return Pod(container, spec["securityContext"], grace)


def kserve() -> Pod:
    runtime = one(FOLDER / "kserve.yaml", "ServingRuntime")["spec"]
    service = one(FOLDER / "kserve.yaml", "InferenceService")["spec"]["predictor"]
    (container,) = runtime["containers"]
    model = service["model"]
    container = container | {"args": container["args"] + model["args"]}
    container["resources"] = model["resources"]
    grace = service["terminationGracePeriodSeconds"]
    return Pod(container, service["securityContext"], grace)


PODS = {"kubernetes": kubernetes, "kserve": kserve}
EACH = pytest.mark.parametrize("pod", [make() for make in PODS.values()], ids=PODS)


@EACH
def test_probes_ask_the_server_with_patience(pod: Pod) -> None:
    """For as long as the image's own check; a busy server lives, one that ends is left soon."""
    ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
    assert str(*ports.values()) == pod.flag("--port")
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = pod.container[name]["httpGet"]
        assert asked["path"] == "/health"
        assert ports.get(asked["port"], asked["port"]) in ports.values()
    startup, readiness, liveness = (
        pod.container[name]["periodSeconds"] * pod.container[name]["failureThreshold"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    )
    (minutes,) = re.findall(r"--start-period=(\d+)m", CUDA)
    assert startup >= int(minutes) * 60 and liveness >= 60 and readiness <= 10


@EACH
def test_running_requests_have_their_time(pod: Pod) -> None:
    before = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {"seconds": 0})
    timeout = pod.flag("--shutdown-timeout")
    assert timeout
    assert pod.grace_s >= before["seconds"] + int(timeout) + ENDING_S


@EACH
def test_the_image_is_ours(pod: Pod) -> None:
    assert pod.container["image"].endswith(f"/vllm-dllm-cuda:{vllm_dllm.__version__}")
    (user,) = re.findall(r"^USER (\d+)$", CUDA, re.MULTILINE)
    assert pod.security["runAsUser"] == pod.security["fsGroup"] == int(user)
    assert pod.container["securityContext"]["allowPrivilegeEscalation"] is False


def test_a_service_finds_its_pods() -> None:
    path = FOLDER / "kubernetes.yaml"
    deployment, service = one(path, "Deployment")["spec"], one(path, "Service")
    labels = deployment["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["selector"]["matchLabels"]
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] in {one["name"] for one in kubernetes().container["ports"]}
    monitor = one(FOLDER / "prometheus-operator.yaml", "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [endpoint["port"] for endpoint in monitor["endpoints"]] == [port["name"]]


def rayservice() -> tuple[dict[str, Any], dict[str, Any]]:
    """The specification of the service, and that of its one application."""
    spec = one(RAY / "rayservice.yaml", "RayService")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    return spec, application


def test_ray_serves_the_application_beside_it() -> None:
    spec, application = rayservice()
    module, _, builder = application["import_path"].partition(":")
    tree = ast.parse((RAY / f"{module}.py").read_text("utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {builder, *(one["name"] for one in application["deployments"])} <= names
    dockerfile = (RAY / "Dockerfile").read_text("utf-8")
    assert f"ray[serve]=={spec['rayClusterConfig']['rayVersion']}" in dockerfile
    groups = spec["rayClusterConfig"]["workerGroupSpecs"]
    for group in (spec["rayClusterConfig"]["headGroupSpec"], *groups):
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"].endswith(f"/vllm-dllm-ray:{vllm_dllm.__version__}")


def test_ray_leaves_running_requests_their_time() -> None:
    spec, application = rayservice()
    (timeout,) = (
        int(word.partition("=")[2])
        for word in application["args"]["command"]
        if word.startswith("--shutdown-timeout=")
    )
    (deployment,) = application["deployments"]
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    needed = timeout + ENDING_S
    assert deployment["graceful_shutdown_timeout_s"] >= needed
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] >= needed
    assert spec["rayClusterDeletionDelaySeconds"] >= needed


def commands() -> Iterator[list[str]]:
    for make in PODS.values():
        args = make().container["args"]
        yield ["vllm", "serve", *(arg for arg in args if "{{" not in arg)]
    values = yaml.safe_load((FOLDER / "production-stack.yaml").read_text("utf-8"))
    (model,) = values["servingEngineSpec"]["modelSpec"]
    yield ["vllm", "serve", model["modelURL"], *model["vllmConfig"]["extraArgs"]]
    yield rayservice()[1]["args"]["command"]


def test_vllm_accepts_the_flags() -> None:
    given = list(commands())
    assert faults(given) == [None] * len(given)


def test_the_operators_rules_are_prometheus_own() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text("utf-8"))
    assert one(FOLDER / "prometheus-operator.yaml", "PrometheusRule")["spec"] == rules


@pytest.mark.parametrize(("name", "expression"), alerts())
def test_an_alert_is_promql_of_one_job(name: str, expression: str) -> None:
    """That a real server has its metrics and labels is tested in `tests/serving/servers`."""
    found = labels_by_metric(expression)
    assert found
    assert all("job" in labels for labels in found.values()), f"{name}: {SCRAPED}"
