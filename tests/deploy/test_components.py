"""Tests what each component adds: groups of ranks, the edge, durability, monitoring."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from deploy_files import (
    DEPLOY,
    K8S,
    ROOT,
    by_name,
    configuration,
    pod,
    rendered_objects,
)
from test_prometheus import alert_rules

EVERYTHING = "gpu edge mtls durable monitoring group"
# The controller sets these variables before the variables that refer to them.
CONTROLLERS = {"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}


def group(name: str) -> dict[str, Any]:
    (item,) = rendered_objects(name)["LeaderWorkerSet"]
    parts: dict[str, Any] = item["spec"]["leaderWorkerTemplate"]
    return parts


def containers(name: str) -> list[dict[str, Any]]:
    """Returns the containers of the leader and of a worker."""
    parts = group(name)
    found = []
    for template in ("leaderTemplate", "workerTemplate"):
        (container,) = parts[template]["spec"]["containers"]
        found.append(container)
    return found


def test_ranks_get_the_environment_that_weftd_reads() -> None:
    source = (ROOT / "src" / "base" / "options" / "world.cc").read_text()
    read = set(re.findall(r'read(?:, |\()"([A-Z_]+)"', source))
    torchruns = {name for name in read if name.startswith("TORCHELASTIC_")}
    for container in containers("multi-gpu"):
        values = {entry["name"]: entry["value"] for entry in container["env"]}
        assert read - torchruns <= set(values)
        named = set(re.findall(r"\$\((\w+)\)", " ".join(values.values())))
        assert named == CONTROLLERS
        assert values["RANK"] == "$(LWS_WORKER_INDEX)"
        # Each pod has one rank.
        assert (values["LOCAL_RANK"], values["LOCAL_WORLD_SIZE"]) == ("0", "1")


@pytest.mark.parametrize("name", ["multi-gpu"])
def test_a_group_has_as_many_pods_as_ranks(name: str) -> None:
    config = configuration(name)
    ranks = int(config["WEFT_TENSOR_PARALLEL_SIZE"])
    ranks *= int(config["WEFT_DATA_PARALLEL_SIZE"])
    assert group(name)["size"] == ranks
    assert group(name)["restartPolicy"] == "RecreateGroupOnPodRestart"


@pytest.mark.parametrize("name", ["multi-gpu", EVERYTHING])
def test_workers_are_the_leader_without_probes(name: str) -> None:
    leader, worker = containers(name)
    probes = {"startupProbe", "readinessProbe", "livenessProbe"}
    assert probes <= set(leader) and not probes & set(worker)
    for field in set(leader) - probes:
        assert worker[field] == leader[field], field
    kinds = rendered_objects(name)
    assert "StatefulSet" not in kinds
    for service in kinds["Service"]:
        index = service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"]
        assert index == "0"


def test_a_groups_pod_is_that_of_one_gpu() -> None:
    assert pod("multi-gpu")["volumes"] == pod("single-gpu")["volumes"]
    (single,) = pod("single-gpu")["containers"]
    leader, _ = containers("multi-gpu")
    config = {"env", "envFrom"}
    assert set(leader) - config == set(single) - config
    for field in set(single) - config:
        assert leader[field] == single[field], field


def test_ranks_reach_each_other_and_nobody_else_reaches_them() -> None:
    policy = by_name("multi-gpu", "NetworkPolicy")["weftd-ranks"]["spec"]
    ranks = {"podSelector": policy["podSelector"]}
    assert policy["ingress"] == [{"from": [ranks]}]
    assert policy["egress"] == [{"to": [ranks]}]


def sidecar(name: str) -> dict[str, Any]:
    (edge,) = pod(name)["initContainers"]
    # Otherwise the pod would wait for its end before it starts weftd.
    assert edge["restartPolicy"] == "Always"
    return dict(edge)


@pytest.mark.parametrize("name", ["production", EVERYTHING])
def test_only_the_edge_is_reached_from_outside(name: str) -> None:
    config = configuration(name)
    assert config["WEFT_TRUSTED_NETWORK"] == "false"
    for setting in ("WEFT_LISTEN", "WEFT_TINKER_LISTEN"):
        host, _, port = config[setting].partition(":")
        assert host == "127.0.0.1"
        assert f"server 127.0.0.1:{port} " in (DEPLOY / "edge/nginx.conf").read_text()
    (port,) = sidecar(name)["ports"]
    assert (
        f"listen {port['containerPort']} ssl"
        in (DEPLOY / "edge" / "nginx.conf").read_text()
    )
    policy = by_name(name, "NetworkPolicy")["weftd"]["spec"]
    (admitted,) = policy["ingress"][0]["ports"]
    assert admitted["port"] == port["containerPort"]
    for service in rendered_objects(name)["Service"]:
        for entry in service["spec"]["ports"]:
            if entry["name"] == "grpc":
                assert entry["targetPort"] == port["name"]
                assert entry["appProtocol"] == "https"


@pytest.mark.parametrize("name", ["production", EVERYTHING])
def test_secrets_are_mounted_as_folders_that_the_kubelet_updates(name: str) -> None:
    (weftd,) = pod(name)["containers"]
    for container, volume, path in (
        (sidecar(name), "tls", "/etc/weft/edge/tls"),
        (weftd, "tokens", "/etc/weft/tokens"),
    ):
        mounts = {m["name"]: m for m in container["volumeMounts"]}
        assert mounts[volume]["readOnly"] is True
        # The kubelet updates a mounted folder, but never a single file (subPath).
        assert "subPath" not in mounts[volume]
        assert mounts[volume]["mountPath"] == path
    tokens = configuration(name)["WEFT_AUTH_TOKENS_FILE"]
    assert tokens.startswith("/etc/weft/tokens/")
    for volume in pod(name)["volumes"]:
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] == 0o440


def test_mutual_tls_is_one_word() -> None:
    assert sidecar(EVERYTHING)["args"] == ["--mtls"]
    assert "args" not in sidecar("production")
    assert "--mtls)" in (DEPLOY / "edge" / "run.sh").read_text()
    image = (DEPLOY / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["/opt/weft/edge/run.sh", "--dir", "/etc/weft/edge"]' in image


def test_the_log_has_a_volume_of_its_own() -> None:
    (stateful,) = rendered_objects("gpu durable")["StatefulSet"]
    claims = [c["metadata"]["name"] for c in stateful["spec"]["volumeClaimTemplates"]]
    assert claims == ["checkpoints", "state"]
    mounts = {m["name"]: m for m in pod("gpu durable")["containers"][0]["volumeMounts"]}
    folder = configuration("gpu durable")["WEFT_STATE_DIR"]
    assert folder.startswith(mounts["state"]["mountPath"] + "/")
    assert not folder.startswith(configuration("gpu durable")["WEFT_CHECKPOINT_DIR"])


def test_the_operator_scrapes_the_job_that_alerts_name() -> None:
    (monitor,) = rendered_objects("production")["ServiceMonitor"]
    (endpoint,) = monitor["spec"]["endpoints"]
    (relabeling,) = endpoint["relabelings"]
    assert relabeling["targetLabel"] == "job"
    named = re.findall(r'job="(\w+)"', " ".join(r["expr"] for r in alert_rules()))
    assert set(named) == {relabeling["replacement"]}
    chosen = [
        service
        for service in rendered_objects("production")["Service"]
        if monitor["spec"]["selector"]["matchLabels"].items()
        <= service["metadata"]["labels"].items()
    ]
    (service,) = chosen
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_grafana_gets_every_dashboard() -> None:
    shipped = {
        path.name: path.read_text() for path in (DEPLOY / "grafana").glob("*.json")
    }
    item = by_name("production", "ConfigMap")["weft-dashboards"]
    assert item["data"] == shipped
    assert item["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_page_says_which_overlay_and_which_component_to_choose() -> None:
    text = (K8S / "README.md").read_text()
    for folder in ("overlays", "components"):
        for path in (K8S / folder).glob("*/kustomization.yaml"):
            name = path.parent.name
            shown = (
                f"`k8s/overlays/{name}`" if folder == "overlays" else f"| `{name}` |"
            )
            assert shown in text, name


def test_components_are_listed_in_an_order_that_works() -> None:
    """Component `group` copies the pod, so it comes after the components that change
    the pod."""
    for path in K8S.glob("overlays/*/kustomization.yaml"):
        listed = yaml.safe_load(path.read_text()).get("components", [])
        names = [name.rpartition("/")[2] for name in listed]
        assert "group" not in names[:-1], path
