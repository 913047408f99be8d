"""Tests what the files for a standby say: the overlay, the compose file, and the probe
that both use."""

from __future__ import annotations

import copy
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml
from deploy_files import DEPLOY, ROOT, by_name, configuration, pod

FLEETS = ("fleet", "standby")
DAEMONS = ("weftd-a", "weftd-b", "weftd-c")
PHASES = ("listening", "loading", "standby", "serving", "draining")


def container() -> dict[str, Any]:
    (only,) = pod("standby")["containers"]
    return dict(only)


def compose() -> dict[str, Any]:
    text = (DEPLOY / "docker-compose.standby.yml").read_text()
    return dict(yaml.safe_load(text)["services"])


@contextmanager
def metrics_page(phase: str) -> Iterator[int]:
    """Serves a page of metrics as weftd does, and yields its port."""
    lines = [f'weft_startup_phase{{phase="{p}"}} {int(p == phase)}' for p in PHASES]
    page = "\n".join(["# TYPE weft_startup_phase gauge", *lines, ""]).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/metrics"
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("phase", PHASES)
def test_a_pod_is_ready_when_it_serves_or_stands_by(phase: str) -> None:
    probe = container()["readinessProbe"]["exec"]["command"]
    assert container()["startupProbe"]["exec"]["command"] == probe
    with metrics_page(phase) as port:
        command = [word.replace("/9400;", f"/{port};") for word in probe]
        assert command != probe
        done = subprocess.run(command, capture_output=True, timeout=10)
    assert (done.returncode == 0) == (phase in ("serving", "standby")), done.stderr
    # Nobody listens any more.
    assert subprocess.run(command, capture_output=True, timeout=10).returncode != 0


def test_an_update_loads_a_pod_before_it_ends_one() -> None:
    spec = by_name("standby", "Deployment")["weftd"]["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    startup = container()["startupProbe"]
    loading = startup["periodSeconds"] * startup["failureThreshold"]
    # The rollout has not failed while a pod loads.
    assert spec["progressDeadlineSeconds"] > loading
    budget = by_name("standby", "PodDisruptionBudget")["weftd"]["spec"]
    assert budget["maxUnavailable"] == 1


def test_a_fleet_has_a_pod_for_each_log_and_one_that_stands_by() -> None:
    fleet, standby = (
        copy.deepcopy(by_name(name, "Deployment")["weftd"]) for name in FLEETS
    )
    logs = int(configuration("fleet")["WEFT_LOGS"])
    assert fleet["spec"].pop("replicas") == logs + 1
    assert standby["spec"].pop("replicas") == 2
    # Nothing else differs, but for the name of the configuration.
    assert configuration("fleet") == {
        **configuration("standby"),
        "WEFT_LOGS": str(logs),
    }
    for item in (fleet, standby):
        del item["spec"]["template"]["spec"]["containers"][0]["envFrom"][0]
    assert fleet == standby


def test_a_pod_has_a_name_an_address_and_no_state_of_its_own() -> None:
    variables = {entry["name"]: entry for entry in container()["env"]}
    fields = {
        name: entry["valueFrom"]["fieldRef"]["fieldPath"]
        for name, entry in variables.items()
        if "valueFrom" in entry
    }
    assert fields == {"POD_IP": "status.podIP", "WEFT_INSTANCE": "metadata.name"}
    _, _, port = configuration("standby")["WEFT_LISTEN"].partition(":")
    assert variables["WEFT_ADVERTISE_ADDRESS"]["value"] == f"$(POD_IP):{port}"
    volumes = {volume["name"]: volume for volume in pod("standby")["volumes"]}
    assert volumes["scratch"]["emptyDir"] == {}
    kind = "persistentVolumeClaim"
    claims = [volume[kind] for volume in volumes.values() if kind in volume]
    assert claims == [{"claimName": "weft-base-model", "readOnly": True}]


def test_the_two_are_on_two_nodes_and_reach_the_store() -> None:
    (spread,) = pod("standby")["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    labels = by_name("standby", "Deployment")["weftd"]["spec"]["template"]["metadata"]
    assert spread["labelSelector"]["matchLabels"] == labels["labels"]
    egress = by_name("standby", "NetworkPolicy")["weftd"]["spec"]["egress"]
    assert {"ports": [{"protocol": "TCP", "port": 443}]} in egress
    account = by_name("standby", "ServiceAccount")[pod("standby")["serviceAccountName"]]
    assert account["automountServiceAccountToken"] is False


def test_daemons_of_the_compose_file_differ_in_their_names_only() -> None:
    names = {"WEFT_INSTANCE", "WEFT_ADVERTISE_ADDRESS"}
    same = []
    for name in DAEMONS:
        service = compose()[name]
        own = service["environment"]
        assert own["WEFT_INSTANCE"] == name
        # Clients on the host follow it.
        assert f"{own['WEFT_ADVERTISE_ADDRESS']}:50051" in service["ports"]
        shared = {k: v for k, v in own.items() if k not in names}
        own_keys = ("ports", "build", "profiles")
        rest = {k: v for k, v in service.items() if k not in own_keys}
        same.append({**rest, "environment": shared})
    assert same[0] == same[1] == same[2]
    # Exit status 4 of a weftd whose state another one has is no end.
    assert same[0]["restart"] == "unless-stopped"
    assert "WEFT_STATE_DIR" not in same[0]["environment"]


def test_the_compose_file_gives_the_store_what_weftd_sends() -> None:
    own = compose()["weftd-a"]["environment"]
    assert own["AWS_ENDPOINT_URL_S3"] == "http://seaweedfs:8333"
    text = (DEPLOY / "docker-compose.standby.yml").read_text()
    (identity,) = json.loads(yaml.safe_load(text)["configs"]["s3"]["content"])[
        "identities"
    ]
    assert identity["credentials"] == [
        {
            "accessKey": own["AWS_ACCESS_KEY_ID"],
            "secretKey": own["AWS_SECRET_ACCESS_KEY"],
        }
    ]
    (config,) = compose()["seaweedfs"]["configs"]
    assert f"-s3.config={config['target']}" in compose()["seaweedfs"]["command"]


def test_containers_that_stand_by_are_healthy() -> None:
    command = container()["readinessProbe"]["exec"]["command"]
    for name in DAEMONS:
        test = compose()[name]["healthcheck"]["test"]
        assert test == ["CMD", *command]
    assert (ROOT / "deploy" / compose()["weftd-a"]["build"]["context"]).is_dir()
