"""Tests the Kubernetes manifests: they are valid for old and new clusters, and
secure."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from deploy_files import (
    DEPLOY,
    MANIFESTS,
    ROOT,
    by_name,
    configuration,
    has_standby,
    pod,
    render,
    rendered_objects,
    run,
    tool,
)

every = pytest.mark.parametrize("name", MANIFESTS)
SCHEMAS = Path(__file__).parent / "crd"
LABELS = {"app.kubernetes.io/name": "weftd", "app.kubernetes.io/instance": "weftd"}


def pod_templates(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns both templates of a LeaderWorkerSet as objects of kind PodTemplate."""
    parts = group["spec"]["leaderWorkerTemplate"]
    return [
        {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": name.lower()},
            "template": parts[name],
        }
        for name in ("leaderTemplate", "workerTemplate")
    ]


@pytest.fixture(scope="module")
def schemas() -> Iterator[None]:
    """The validator reads the definitions of a version once, not for each object."""
    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(kubernetes_validate.utils.schema_contents)
        patch.setattr(kubernetes_validate.utils, "schema_contents", once)
        yield


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize("version", ["1.30.0", "1.37.0"])
def test_rendered_objects_match_the_schemas(version: str) -> None:
    checked: list[dict[str, Any]] = []
    for name in MANIFESTS:
        kinds = rendered_objects(name)
        objects = [item for items in kinds.values() for item in items]
        for group in kinds.get("LeaderWorkerSet", []):
            objects += pod_templates(group)
        for item in objects:
            # Manifests have most of their objects in common.
            if not (SCHEMAS / f"{item['kind']}.json").exists() and item not in checked:
                kubernetes_validate.validate(item, version, strict=True)
                checked.append(item)
    assert {"PodTemplate", "StatefulSet"} <= {item["kind"] for item in checked}


def check_custom(item: dict[str, Any]) -> None:
    """Raises unless the object matches its CustomResourceDefinition."""
    schema = json.loads((SCHEMAS / f"{item['kind']}.json").read_text())
    assert item["apiVersion"] == schema["apiVersion"]
    jsonschema.validate(item["spec"], schema["spec"])


@every
def test_objects_of_other_projects_match_their_schemas(name: str) -> None:
    for kind, items in rendered_objects(name).items():
        for item in items if (SCHEMAS / f"{kind}.json").exists() else []:
            check_custom(item)


def test_the_alerts_become_an_object_of_the_operator() -> None:
    script = DEPLOY / "prometheus" / "as_prometheus_rule.sh"
    item = yaml.safe_load(run(str(script), cwd=Path("/")))
    check_custom(item)
    base = "https://git.example.org/weft/blob/main/"
    command = f"RUNBOOK_BASE={base} {script}"
    linked = yaml.safe_load(run("bash", "-c", command))["spec"]["groups"][0]["rules"]
    for rule in linked:
        url = rule["annotations"]["runbook_url"]
        assert url == f"{base}deploy/RUNBOOK.md#{rule['alert'].lower()}"
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    assert item["spec"] == rules
    item["spec"]["groups"][0]["rules"][0]["alrt"] = "x"
    with pytest.raises(jsonschema.ValidationError):
        check_custom(item)


@every
def test_pods_have_no_privileges(name: str) -> None:
    kinds = rendered_objects(name)
    pods = [item["spec"]["template"]["spec"] for item in kinds.get("Deployment", [])]
    for group in kinds.get("LeaderWorkerSet", []):
        pods += [item["template"]["spec"] for item in pod_templates(group)]
    for spec in [pod(name), *pods]:
        assert spec["enableServiceLinks"] is False
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            assert container["resources"]["limits"]["memory"]
        assert not [v for v in spec["volumes"] if "hostPath" in v]


@every
def test_a_restart_keeps_every_answered_step(name: str) -> None:
    folder = configuration(name)["WEFT_STATE_DIR"]
    if not has_standby(name):
        assert folder.startswith("/var/lib/weft/state")
        return
    assert folder == ""
    (container,) = pod(name)["containers"]
    # It has WEFT_STATE. It is not optional, so no pod starts without it.
    assert container["envFrom"][1] == {"secretRef": {"name": "weftd-store"}}


def test_weftctl_works_in_the_production_pod() -> None:
    (container,) = pod("production")["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert variables["WEFT_SERVER"] == configuration("production")["WEFT_LISTEN"]
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "operator")
    assert Path(variables["WEFT_TOKEN_FILE"]).parent == Path(mount["mountPath"])
    (volume,) = (v for v in pod("production")["volumes"] if v["name"] == "operator")
    assert volume["secret"]["optional"] is True


@every
def test_probes_need_no_token(name: str) -> None:
    """They ask the metrics port, which the kubelet reaches whatever the gRPC port
    requires."""
    (container,) = pod(name)["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    listen = configuration(name)["WEFT_METRICS_LISTEN"]
    assert listen == f"0.0.0.0:{ports['metrics']}"
    paths = {"livenessProbe": "/livez"}
    if not has_standby(name):
        paths |= {"startupProbe": "/readyz", "readinessProbe": "/readyz"}
    for probe, path in paths.items():
        assert container[probe]["httpGet"] == {"path": path, "port": "metrics"}


def heartbeat_limit() -> int:
    """Returns the age of the heartbeat, in seconds, from which weftd is not alive."""
    header = (ROOT / "server" / "daemon" / "listeners.h").read_text()
    minutes = re.search(r"kHeartbeatLimit = absl::Minutes\((\d+)\)", header)
    assert minutes
    return 60 * int(minutes[1])


def test_the_heartbeats_limit_is_the_documented_one() -> None:
    minutes = heartbeat_limit() // 60
    page = (DEPLOY / "operate.md").read_text()
    assert f"heartbeat is at most {minutes} minutes old" in page
    runbook = (DEPLOY / "RUNBOOK.md").read_text()
    assert f"After {minutes} minutes\nthe liveness probe restarts" in runbook
    manifest = (DEPLOY / "k8s" / "base" / "statefulset.yaml").read_text()
    assert f"the engine's heartbeat is {minutes} minutes old" in manifest


def test_a_stalled_engine_is_told_before_its_pod_is_restarted() -> None:
    rules = (DEPLOY / "prometheus" / "rules.yml").read_text()
    told = re.search(r"weft_engine_heartbeat_timestamp_seconds > (\d+)", rules)
    assert told
    assert int(told[1]) + 60 < heartbeat_limit()


@every
def test_loading_is_given_half_an_hour_before_liveness_counts(name: str) -> None:
    (container,) = pod(name)["containers"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


@every
def test_the_pod_outlives_its_drain(name: str) -> None:
    drain = int(configuration(name)["WEFT_DRAIN_TIMEOUT_SECONDS"])
    assert pod(name)["terminationGracePeriodSeconds"] >= drain + 60


@every
def test_services_reach_the_ports_of_their_pods(name: str) -> None:
    (container,) = pod(name)["containers"]
    sidecars = pod(name).get("initContainers", [])
    own = [port for part in (container, *sidecars) for port in part["ports"]]
    pods = [(LABELS, own)]
    for item in rendered_objects(name).get("Deployment", []):
        if item["metadata"]["name"] == "weftd":
            continue
        template = item["spec"]["template"]
        ports = template["spec"]["containers"][0]["ports"]
        pods.append((template["metadata"]["labels"], ports))
    for service in rendered_objects(name)["Service"]:
        selector = {
            key: value
            for key, value in service["spec"]["selector"].items()
            if key.startswith("app.kubernetes.io/")
        }
        assert len(selector) == 2
        (ports,) = (p for labels, p in pods if selector.items() <= labels.items())
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in {port["name"] for port in ports}


def test_a_stateful_set_has_its_headless_service() -> None:
    (stateful,) = rendered_objects("single-gpu")["StatefulSet"]
    service = by_name("single-gpu", "Service")[stateful["spec"]["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"


def test_gpus_are_asked_for_where_there_are_some() -> None:
    def limits(name: str) -> dict[str, str]:
        (container,) = pod(name)["containers"]
        return dict(container["resources"]["limits"])

    assert "nvidia.com/gpu" not in limits("dev-cpu")
    assert configuration("dev-cpu")["WEFT_DEVICE"] == "cpu"
    for name in ("single-gpu", "multi-gpu", "production", "standby", "fleet"):
        assert limits(name)["nvidia.com/gpu"] == "1"
        assert configuration(name)["WEFT_DEVICE"] == "cuda"
        assert pod(name)["containers"][0]["image"] == "weft:cuda"


@every
def test_a_client_needs_one_label_and_selectors_choose_these_pods(name: str) -> None:
    policies = by_name(name, "NetworkPolicy")
    budgets = by_name(name, "PodDisruptionBudget")
    (peer,) = policies["weftd"]["spec"]["ingress"][0]["from"]
    assert peer == {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"weft.dev/client": "true"}},
    }
    for item in [
        policies["weftd"]["spec"]["podSelector"],
        budgets["weftd"]["spec"]["selector"],
    ]:
        assert item == {"matchLabels": LABELS}
    assert set(policies["weftd"]["spec"]["policyTypes"]) == {"Ingress", "Egress"}


@every
def test_every_mounted_volume_exists(name: str) -> None:
    kinds = rendered_objects(name)
    claims: set[str] = set()
    for owner in kinds.get("StatefulSet", []) + kinds.get("LeaderWorkerSet", []):
        spec = owner["spec"].get("leaderWorkerTemplate", owner["spec"])
        claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
    assert has_standby(name) != bool(claims)
    volumes = {volume["name"] for volume in pod(name)["volumes"]}
    parts = [*pod(name)["containers"], *pod(name).get("initContainers", [])]
    mounts = {m["name"]: m["mountPath"] for part in parts for m in part["volumeMounts"]}
    assert set(mounts) == volumes | claims
    config = configuration(name)
    paths = [v for v in config.values() if v.startswith(("/var/", "/etc/", "/models/"))]
    assert len(paths) >= 2
    for path in paths:
        assert any(Path(path).is_relative_to(mount) for mount in mounts.values()), path


def test_configuration_is_named_by_its_hash_everywhere() -> None:
    for name in MANIFESTS:
        names = set(by_name(name, "ConfigMap"))
        used = set(re.findall(r"configMap(?:Ref)?:\n\s+name: (\S+)", render(name)))
        assert used and used <= names, name


def test_yamllint_finds_nothing() -> None:
    rules = (
        "{extends: default, rules: {document-start: disable,"
        " braces: {max-spaces-inside: 1}, line-length: {max: 130}}}"
    )
    run(tool("yamllint"), "--strict", "-d", rules, str(DEPLOY))
