"""The manifests of examples (deploy, monitoring) fit the server, the images and each other.

They are compared with what the server does and with the files of this repository. Kubernetes' own
schemas are not among the development tools: `make schemas` fetches them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import vllm_dllm
from tests.support.checkpoints import ROOT
from tests.support.dashboard import MONITORING
from tests.support.documents.running import faults

FOLDER = ROOT / "examples" / "deploy"
AFTER_S = 15  # what a server may need after its last answer


class Pod(NamedTuple):
    """A pod that runs a server, as its controller puts it together."""

    spec: dict[str, Any]
    container: dict[str, Any]
    args: list[str]


def one(path: Path, kind: str) -> dict[str, Any]:
    documents = yaml.safe_load_all(path.read_text("utf-8"))
    (found,) = (document["spec"] for document in documents if document["kind"] == kind)
    return found


def pods() -> Iterator[Pod]:
    spec = one(FOLDER / "kubernetes.yaml", "Deployment")["template"]["spec"]
    (container,) = spec["containers"]
    yield Pod(spec, container, container["args"])
    spec = one(FOLDER / "kserve.yaml", "InferenceService")["predictor"]
    (container,) = one(FOLDER / "kserve.yaml", "ServingRuntime")["containers"]
    yield Pod(spec, container, container["args"] + spec["model"]["args"])


def ending_s(command: list[str]) -> int:
    """How long a server with these flags may take to end."""
    (found,) = (word for word in command if word.startswith("--shutdown-timeout="))
    return int(found.partition("=")[2]) + AFTER_S


@pytest.mark.parametrize("pod", pods(), ids=["kubernetes", "kserve"])
def test_a_pod_has_our_image_and_its_time(pod: Pod) -> None:
    before = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {"seconds": 0})
    assert pod.spec["terminationGracePeriodSeconds"] >= before["seconds"] + ending_s(pod.args)
    assert pod.container["image"].endswith(f"/vllm-dllm-cuda:{vllm_dllm.__version__}")
    dockerfile = (ROOT / "containers" / "cuda.Dockerfile").read_text("utf-8")
    (user,) = re.findall(r"^USER (\d+)$", dockerfile, re.MULTILINE)
    security = pod.spec["securityContext"]
    assert security["runAsUser"] == security["fsGroup"] == int(user)
    assert pod.container["securityContext"]["allowPrivilegeEscalation"] is False


RAY = one(FOLDER / "ray" / "rayservice.yaml", "RayService")
(APPLICATION,) = yaml.safe_load(RAY["serveConfigV2"])["applications"]


def test_ray_leaves_running_requests_their_time() -> None:
    (deployment,) = APPLICATION["deployments"]
    (workers,) = RAY["rayClusterConfig"]["workerGroupSpecs"]
    needed = ending_s(APPLICATION["args"]["command"])
    assert deployment["graceful_shutdown_timeout_s"] >= needed
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] >= needed
    assert RAY["rayClusterDeletionDelaySeconds"] >= needed


def commands() -> Iterator[list[str]]:
    for pod in pods():
        yield ["vllm", "serve", *(arg for arg in pod.args if "{{" not in arg)]
    values = yaml.safe_load((FOLDER / "production-stack.yaml").read_text("utf-8"))
    (model,) = values["servingEngineSpec"]["modelSpec"]
    yield ["vllm", "serve", model["modelURL"], *model["vllmConfig"]["extraArgs"]]
    yield APPLICATION["args"]["command"]


def test_vllm_accepts_the_flags() -> None:
    given = list(commands())
    assert faults(given) == [None] * len(given)


def test_the_operators_rules_are_prometheus_own() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text("utf-8"))
    assert one(FOLDER / "prometheus-operator.yaml", "PrometheusRule") == rules


# ---- examples/monitoring

# Of Debian's package `prometheus`.
PROMTOOL = shutil.which("promtool")


@pytest.mark.long
@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool")
@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", str(MONITORING / "prometheus.yml")),  # the rules, too
        ("test", "rules", str(Path(__file__).parent / "alerts_test.yml")),
    ],
    ids=["configuration", "alerts"],
)
def test_promtool_agrees(words: tuple[str, ...]) -> None:
    assert PROMTOOL
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
