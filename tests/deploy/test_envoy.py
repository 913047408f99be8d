"""Runs Envoy, as deploy/k8s/components/replicas configures it, in front of two
servers.

The servers are fake_weftd: the real server with canned results. Only addresses
differ from the shipped configuration.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_files import K8S, ROOT, built, by_name, run, tool, weftctl

sys.path[:0] = [
    str(ROOT / folder) for folder in ("tests/client", "tests/oracle", "client/python")
]

import generate  # noqa: E402

generate.ensure()

from daemon import free_port  # noqa: E402
from fake_weftd import FakeWeftd  # noqa: E402

import weft  # noqa: E402

CONFIG = K8S / "components" / "replicas" / "envoy.yaml"
REPLICAS = ("weftd-0", "weftd-1")
START_SECONDS = 20.0
ADAPTERS = [f"adapter-{number}" for number in range(12)]


def endpoints(config: dict[str, Any]) -> list[dict[str, Any]]:
    (cluster,) = config["static_resources"]["clusters"]
    (locality,) = cluster["load_assignment"]["endpoints"]
    return [entry["endpoint"] for entry in locality["lb_endpoints"]]


def test_envoy_accepts_the_configuration(tmp_path: Path) -> None:
    run(tool("envoy"), "--mode", "validate", "--config-path", str(CONFIG))
    wrong = tmp_path / "envoy.yaml"
    wrong.write_text(CONFIG.read_text().replace("RING_HASH", "RING_HUSH"))
    with pytest.raises(AssertionError, match="RING_HUSH"):
        run(tool("envoy"), "--mode", "validate", "--config-path", str(wrong))


def test_every_replica_has_a_service_and_a_place_on_the_ring() -> None:
    stateful = by_name("replicas", "StatefulSet")["weftd"]
    assert stateful["spec"]["replicas"] == len(REPLICAS)
    found = endpoints(yaml.safe_load(CONFIG.read_text()))
    assert [endpoint["hostname"] for endpoint in found] == list(REPLICAS)
    services = by_name("replicas", "Service")
    for endpoint in found:
        address = endpoint["address"]["socket_address"]
        assert address == {"address": endpoint["hostname"], "port_value": 50051}
        selector = services[address["address"]]["spec"]["selector"]
        name = "statefulset.kubernetes.io/pod-name"
        assert selector[name] == address["address"]


def test_the_pods_envoy_is_the_one_that_was_tried() -> None:
    deployment = by_name("replicas", "Deployment")["weft-envoy"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    version = container["image"].rpartition("-v")[2]
    assert f"/{version}/" in run(tool("envoy"), "--version")


class Proxied:
    """Two servers, and an Envoy that listens on `target`."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        self.targets = targets
        config = yaml.safe_load(CONFIG.read_text())
        for endpoint, target in zip(endpoints(config), targets, strict=True):
            host, _, port = target.rpartition(":")
            endpoint["address"]["socket_address"] = {
                "address": host,
                "port_value": int(port),
            }
        ports = {}
        for listener in config["static_resources"]["listeners"]:
            ports[listener["name"]] = free_port()
            listener["address"]["socket_address"] = {
                "address": "127.0.0.1",
                "port_value": ports[listener["name"]],
            }
        config["admin"]["address"]["socket_address"]["port_value"] = free_port()
        self.target = f"127.0.0.1:{ports['grpc']}"
        self.ready = f"http://127.0.0.1:{ports['ready']}/ready"
        self._file = folder / "envoy.yaml"
        self._file.write_text(yaml.safe_dump(config))
        self._log = folder / "envoy.log"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        command = [tool("envoy"), "--config-path", str(self._file)]
        command += ["--disable-hot-restart", "--concurrency", "1"]
        with self._log.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            limit = time.monotonic() + START_SECONDS
            while not self._is_ready():
                assert process.poll() is None, self._log.read_text()
                assert time.monotonic() < limit, self._log.read_text()
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.ready, timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def holders(self) -> dict[str, int]:
        """Returns which of the servers holds each adapter, as the servers report
        it."""
        found: dict[str, int] = {}
        for number, target in enumerate(self.targets):
            with weft.Client(target) as client:
                for adapter in client.adapters():
                    assert adapter.adapter_id not in found
                    found[adapter.adapter_id] = number
        return found


@pytest.fixture
def servers() -> Iterator[list[FakeWeftd]]:
    built("tests/support/fake_weftd")
    with FakeWeftd() as first, FakeWeftd() as second:
        yield [first, second]


@pytest.fixture
def proxied(tmp_path: Path, servers: list[FakeWeftd]) -> Iterator[Proxied]:
    proxy = Proxied(tmp_path, [server.target for server in servers])
    with proxy.running():
        yield proxy


def use(client: weft.Client, adapter_id: str, folder: Path) -> None:
    """Makes every kind of call that names an adapter. Only one replica has the
    adapter."""
    adapter = client.create_adapter(adapter_id)
    adapter.forward_backward([weft.Datum.next_token([1, 2, 3])])
    adapter.optim_step(learning_rate=1e-3)
    adapter.snapshot("s")
    assert adapter.sample([1], max_tokens=2).samples[0].tokens == [2, 3]
    assert list(adapter.sample_stream([1], max_tokens=2))
    adapter.export(folder / adapter_id)
    client.import_adapter(f"{adapter_id}-copy", folder / adapter_id)
    assert client.adapter(f"{adapter_id}-copy").id


def test_every_call_of_an_adapter_reaches_the_replica_that_holds_it(
    proxied: Proxied, servers: list[FakeWeftd], tmp_path: Path
) -> None:
    with weft.Client(proxied.target, retry=weft.NO_RETRY) as client:
        for adapter_id in ADAPTERS:
            use(client, adapter_id, tmp_path)
        held = proxied.holders()
        assert set(held.values()) == {0, 1}
        # A call without an adapter gets an answer too.
        assert client.info().model.name == "toy"

    # weftctl makes these calls with the C++ client.
    for adapter_id in ADAPTERS:
        command = [str(weftctl()), "adapters", "get", adapter_id]
        run(*command, "--server", proxied.target)

    # A replica that is down keeps its adapters, and no other replica gets
    # their calls.
    down = held[ADAPTERS[0]]
    servers[down].__exit__()
    with weft.Client(proxied.target, retry=weft.NO_RETRY) as client:
        for adapter_id in ADAPTERS:
            if held[adapter_id] == down:
                with pytest.raises(weft.Unavailable):
                    client.adapter(adapter_id)
            else:
                client.adapter(adapter_id).resync()


def test_places_on_the_ring_are_those_of_names_not_addresses(tmp_path: Path) -> None:
    """The servers get other addresses at the second start. Each adapter is still on
    the server of the same name."""
    built("tests/support/fake_weftd")
    import weft

    held = []
    for attempt in ("first", "second"):
        (tmp_path / attempt).mkdir()
        with FakeWeftd() as one, FakeWeftd() as two:
            proxy = Proxied(tmp_path / attempt, [one.target, two.target])
            with proxy.running(), weft.Client(proxy.target) as client:
                for adapter_id in ADAPTERS:
                    client.create_adapter(adapter_id)
                held.append(proxy.holders())
    assert held[0] == held[1]
