"""The Kubernetes manifests: valid for old and new clusters, and kept safe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from deploy_files import DEPLOY, K8S_FOLDERS, ROOT, render, rendered_objects, run, tool

both = pytest.mark.parametrize("folder", K8S_FOLDERS)


@both
@pytest.mark.parametrize("version", ["1.30.0", "1.37.0"])
def test_rendered_objects_match_the_schemas(
    folder: str, version: str, tmp_path: Path
) -> None:
    file = tmp_path / "rendered.yaml"
    file.write_text(render(folder))
    run(tool("kubernetes-validate"), "--strict", "-k", version, str(file))


def pod(folder: str) -> dict[str, Any]:
    """The pod's spec."""
    (stateful,) = rendered_objects(folder)["StatefulSet"]
    spec: dict[str, Any] = stateful["spec"]["template"]["spec"]
    return spec


@both
def test_pod_has_no_privileges(folder: str) -> None:
    spec = pod(folder)
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 10001
    assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    (container,) = spec["containers"]
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"]["drop"] == ["ALL"]
    assert container["resources"]["limits"]["memory"]
    assert not [v for v in spec["volumes"] if "hostPath" in v]


@both
def test_probes_go_through_the_grpc_listener(folder: str) -> None:
    (container,) = pod(folder)["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    services = {
        "startupProbe": "weft.v1.TrainingService",
        "livenessProbe": "liveness",
        "readinessProbe": "weft.v1.TrainingService",
    }
    for probe, service in services.items():
        assert container[probe]["grpc"] == {"port": ports["grpc"], "service": service}


def heartbeat_limit() -> int:
    """Seconds after which weftd says that it is not alive."""
    header = (ROOT / "server" / "frontend.h").read_text()
    minutes = re.search(r"kHeartbeatLimit = absl::Minutes\((\d+)\)", header)
    assert minutes
    return 60 * int(minutes[1])


def test_the_heartbeats_limit_is_the_documented_one() -> None:
    minutes = heartbeat_limit() // 60
    readme = (DEPLOY / "README.md").read_text()
    assert f"heartbeat is at most {minutes} minutes old" in readme
    assert f"as the liveness probe does after {minutes} minutes" in readme
    manifest = (DEPLOY / "k8s" / "base" / "statefulset.yaml").read_text()
    assert f"the engine's heartbeat is {minutes} minutes old" in manifest


def test_a_stalled_engine_is_told_before_its_pod_is_restarted() -> None:
    rules = (DEPLOY / "prometheus" / "rules.yml").read_text()
    told = re.search(r"weft_engine_heartbeat_timestamp_seconds > (\d+)", rules)
    assert told
    assert int(told[1]) + 60 < heartbeat_limit()


@both
def test_loading_is_given_half_an_hour_before_liveness_counts(folder: str) -> None:
    (container,) = pod(folder)["containers"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


@both
def test_the_pod_outlives_its_drain(folder: str) -> None:
    (config,) = rendered_objects(folder)["ConfigMap"]
    drain = int(config["data"]["WEFT_DRAIN_TIMEOUT_SECONDS"])
    assert pod(folder)["terminationGracePeriodSeconds"] >= drain + 30


@both
def test_services_reach_the_ports_of_the_pod(folder: str) -> None:
    (container,) = pod(folder)["containers"]
    names = {port["name"] for port in container["ports"]}
    services = rendered_objects(folder)["Service"]
    assert len(services) == 3
    for service in services:
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in names
    (stateful,) = rendered_objects(folder)["StatefulSet"]
    headless = {
        s["metadata"]["name"] for s in services if s["spec"].get("clusterIP") == "None"
    }
    assert headless == {stateful["spec"]["serviceName"]}


def test_gpu_is_asked_for_in_base_alone() -> None:
    def limits(folder: str) -> dict[str, str]:
        (container,) = pod(folder)["containers"]
        return dict(container["resources"]["limits"])

    assert limits("base")["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in limits("overlays/dev-cpu")


def test_yamllint_finds_nothing() -> None:
    rules = (
        "{extends: default, rules: {document-start: disable,"
        " braces: {max-spaces-inside: 1}, line-length: {max: 130}}}"
    )
    run(tool("yamllint"), "--strict", "-d", rules, str(DEPLOY))
