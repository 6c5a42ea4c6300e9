"""The manifests of examples/deploy fit the server, the images, the alerts and each other.

They are compared with what the server does and with the files of this repository. Kubernetes' own
schemas are not among the development tools: `make schemas` fetches them.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import vllm_dllm
from tests.support.checkpoints import ROOT
from tests.support.dashboard import MONITORING, SCRAPED, alerts, labels_by_metric
from tests.support.documents.running import environment

FOLDER = ROOT / "examples" / "deploy"
FILES = sorted(FOLDER.rglob("*.yaml"))
RAY = FOLDER / "ray"
CUDA = (ROOT / "containers" / "cuda.Dockerfile").read_text("utf-8")
DEFAULT_GRACE_S = 30  # Kubernetes'
ENDING_S = 15  # what a server may need after its last answer
CACHES = {"VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}


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
    volumes: list[dict[str, Any]]
    security: dict[str, Any]
    grace_s: int

    def flag(self, name: str) -> str | None:
        given = [arg.split("=", 1)[1] for arg in self.container["args"] if arg.startswith(name)]
        return given[-1] if given else None


def kubernetes() -> Pod:
    spec = one(FOLDER / "kubernetes.yaml", "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    grace = spec["terminationGracePeriodSeconds"]
    return Pod(container, spec["volumes"], spec["securityContext"], grace)


def kserve() -> Pod:
    runtime = one(FOLDER / "kserve.yaml", "ServingRuntime")["spec"]
    service = one(FOLDER / "kserve.yaml", "InferenceService")["spec"]["predictor"]
    (container,) = runtime["containers"]
    model = service["model"]
    container = container | {"args": container["args"] + model["args"]}
    container["resources"] = model["resources"]
    grace = service["terminationGracePeriodSeconds"]
    return Pod(container, runtime["volumes"], service["securityContext"], grace)


def production_stack() -> Pod:
    """What the chart's templates make of the values, where it matters here."""
    values = yaml.safe_load((FOLDER / "production-stack.yaml").read_text("utf-8"))
    engine = values["servingEngineSpec"]
    (model,) = engine["modelSpec"]
    extra = model["vllmConfig"]["extraArgs"]
    flags = [f"{name}={value}" for name, value in zip(extra[::2], extra[1::2], strict=True)]
    length = f"--max-model-len={model['vllmConfig']['maxModelLen']}"
    container = {
        "image": f"{model['repository']}:{model['tag']}",
        "args": [model["modelURL"], "--port=8000", length, *flags],
        "ports": [{"name": "container-port", "containerPort": 8000}],
        "env": [*model["env"], {"name": "HF_HOME", "value": "/data"}],
        "volumeMounts": [
            {"name": "storage", "mountPath": "/data"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        "securityContext": engine["containerSecurityContext"],
    }
    container |= {name: engine[name] for name in ("startupProbe", "readinessProbe")}
    container["livenessProbe"] = engine["livenessProbe"]
    volumes = [
        {"name": "storage", "persistentVolumeClaim": {"claimName": "the chart's"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": model["shmSize"]}},
    ]
    return Pod(container, volumes, engine["securityContext"], DEFAULT_GRACE_S)


PODS = {"kubernetes": kubernetes, "kserve": kserve, "production-stack": production_stack}
EACH = pytest.mark.parametrize("pod", [make() for make in PODS.values()], ids=PODS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_complete(path: Path) -> None:
    """Whether it was run is said in its head; and every object has a name of its own."""
    head = path.read_text("utf-8").split("\n\n")[0]
    assert "Not run on a cluster." in head.split("\napi")[0].split("\nserving")[0]
    if path.name == "production-stack.yaml":
        return  # values have no objects
    found = documents(path)
    names = [(item["apiVersion"], item["kind"], item["metadata"]["name"]) for item in found]
    assert len(set(names)) == len(names)


@EACH
def test_probes_ask_the_server(pod: Pod) -> None:
    ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
    assert str(*ports.values()) == pod.flag("--port")
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = pod.container[name]["httpGet"]
        assert asked["path"] == "/health"
        assert ports.get(asked["port"], asked["port"]) in ports.values()


def gives_up_after(probe: dict[str, Any]) -> int:
    return probe["periodSeconds"] * probe["failureThreshold"]


@EACH
def test_probes_have_patience(pod: Pod) -> None:
    """For as long as the image's own check; a busy server lives, one that ends is left soon."""
    (minutes,) = re.findall(r"--start-period=(\d+)m", CUDA)
    assert gives_up_after(pod.container["startupProbe"]) >= int(minutes) * 60
    assert gives_up_after(pod.container["livenessProbe"]) >= 60
    assert gives_up_after(pod.container["readinessProbe"]) <= 10


def test_a_rollout_waits_for_a_start() -> None:
    spec = one(FOLDER / "kubernetes.yaml", "Deployment")["spec"]
    startup = kubernetes().container["startupProbe"]
    assert spec["progressDeadlineSeconds"] > gives_up_after(startup)


@EACH
def test_running_requests_have_their_time(pod: Pod) -> None:
    before = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {"seconds": 0})
    timeout = pod.flag("--shutdown-timeout")
    assert timeout
    assert pod.grace_s >= before["seconds"] + int(timeout) + ENDING_S


@EACH
def test_what_is_kept_is_on_a_volume(pod: Pod) -> None:
    volumes = {volume["name"]: volume for volume in pod.volumes}
    mounts = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    folders = {item["name"]: item["value"] for item in pod.container["env"]}
    assert set(folders) >= CACHES
    for folder in folders.values():
        (mount,) = (path for path in mounts if folder == path or folder.startswith(f"{path}/"))
        assert "persistentVolumeClaim" in volumes[mounts[mount]]


@pytest.mark.parametrize("name", ["kubernetes", "kserve"])
def test_claims_are_there(name: str) -> None:
    path = FOLDER / f"{name}.yaml"
    claimed = {d["metadata"]["name"] for d in documents(path) if "Claim" in d["kind"]}
    volumes = [volume.get("persistentVolumeClaim") for volume in PODS[name]().volumes]
    assert {claim["claimName"] for claim in volumes if claim} == claimed


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
    assert f"COPY {(RAY / module).relative_to(ROOT)}.py" in dockerfile
    groups = spec["rayClusterConfig"]["workerGroupSpecs"]
    for group in (spec["rayClusterConfig"]["headGroupSpec"], *groups):
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"].endswith(f"/vllm-dllm-ray:{vllm_dllm.__version__}")


def test_hadolint_finds_nothing() -> None:
    command = [str(Path(sys.executable).with_name("hadolint")), str(RAY / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout + done.stderr, done.returncode) == ("", 0)


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
    yield rayservice()[1]["args"]["command"]


def test_vllm_accepts_the_flags() -> None:
    given = json.dumps(list(commands()))
    command = [sys.executable, "-m", "tests.support.children.parse_child", given]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(ROOT), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [None] * len(list(commands()))


def test_the_operators_rules_are_prometheus_own() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text("utf-8"))
    assert one(FOLDER / "prometheus-operator.yaml", "PrometheusRule")["spec"] == rules


@pytest.mark.parametrize(("name", "expression"), alerts())
def test_an_alert_is_promql_of_one_job(name: str, expression: str) -> None:
    """That a real server has its metrics and labels is tested in `tests/serving/servers`."""
    found = labels_by_metric(expression)
    assert found
    assert all("job" in labels for labels in found.values()), f"{name}: {SCRAPED}"
