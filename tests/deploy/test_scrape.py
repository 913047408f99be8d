"""A Prometheus scrapes live weftds, and the queries of dashboards and alerts find
data."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_files import DEPLOY, ROOT, daemon, tool
from test_dashboards import DASHBOARDS, expressions
from test_prometheus import alert_rules

sys.path[:0] = [
    str(ROOT / name)
    for name in ("tests/oracle", "tests/e2e", "tests/fleet", "client/python")
]

import generate  # noqa: E402

generate.ensure()

import daemon as daemon_module  # noqa: E402
import models  # noqa: E402
from members import Fleet  # noqa: E402

import weft  # noqa: E402

LIMIT_SECONDS = 30.0
# Whether these alerts fire depends on the disk of the machine that runs the test.
ABOUT_THE_DISK = {"WeftDiskLow", "WeftDiskFills", "WeftJournalSlow"}


class Prometheus:
    """Runs a Prometheus with the shipped configuration, except for the targets and the
    intervals."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
        config = yaml.safe_load(text)
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOY / "prometheus" / "rules.yml")]
        config["scrape_configs"] = [
            job for job in config["scrape_configs"] if job["job_name"] == "weft"
        ]
        config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.address = f"127.0.0.1:{daemon_module.free_port()}"
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    tool("prometheus"),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.address}",
                ],
                stdout=log,
                stderr=log,
            )

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        url = f"http://{self.address}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[Any]:
        return list(self.get("query", query=expression)["result"])

    def wait_for(self, expression: str) -> None:
        limit = time.monotonic() + LIMIT_SECONDS
        while True:
            assert self.process.poll() is None, "prometheus has ended"
            try:
                if self.query(expression):
                    return
            except OSError:
                pass  # Prometheus does not listen yet.
            assert time.monotonic() < limit, expression
            time.sleep(0.1)


def work(process: Any) -> None:
    """Does some work of each kind that the metrics count."""
    with process.client() as client:
        for name in ("a", "b", "c"):
            adapter = client.create_adapter(name, rank=4)
            adapter.forward_backward([weft.Datum.next_token([5, 6, 7, 8])])
            adapter.optim_step(learning_rate=1e-3)
            adapter.sample([5, 6, 7], max_tokens=4, ignore_eos=True)
        adapter.save("first")
        adapter.load("first")


@contextmanager
def owner_and_standby(folder: Path) -> Iterator[list[str]]:
    """Runs two weftds with one state in a store, and yields their pages' addresses."""
    with Fleet(folder, (folder / "store").as_uri(), {}) as fleet:
        for name, phase in (("owner", "serving"), ("standby", "standby")):
            fleet.add(name).wait_for(phase)
        yield [member.metrics_address for member in fleet.members]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    daemon()
    folder = tmp_path_factory.mktemp("scrape")
    model = models.tiny_model("llama-tied")
    flags = (
        "--max-resident-adapters=2",
        "--tenant-weights=a=1",
        f"--state-dir={folder / 'state'}",
    )
    with (
        owner_and_standby(folder) as others,
        daemon_module.running(model, folder / "weftd", *flags) as process,
    ):
        server = Prometheus(folder, [process.metrics_address, *others])
        try:
            # A rate needs one sample of this weftd from before its work and one from
            # afterwards, and two of the others, which may come earlier or later.
            steps = f'weft_optim_steps_total{{instance="{process.metrics_address}"}}'
            server.wait_for(f"{steps} == 0")
            work(process)
            server.wait_for(f"rate({steps}[5m]) > 0")
            server.wait_for("rate(weft_store_request_seconds_count[5m])")
            yield server
        finally:
            server.process.terminate()
            server.process.wait()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.stem)
def test_every_query_of_a_dashboard_has_data(
    path: Path, prometheus: Prometheus
) -> None:
    for expression in expressions(path):
        # Some queries end in `> 0` to hide zeros, which are normal on a CPU.
        asked = expression.removesuffix(" > 0")
        assert prometheus.query(asked), expression


def test_the_page_is_scraped_as_the_alerts_name_it(prometheus: Prometheus) -> None:
    up = prometheus.query('up{job="weft"}')
    assert [series["value"][1] for series in up] == ["1"] * 3
    # An error in the page's format would be in lastError.
    for target in prometheus.get("targets")["activeTargets"]:
        assert target["health"] == "up" and not target["lastError"]


def test_every_alert_is_evaluated_and_quiet(prometheus: Prometheus) -> None:
    groups = prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    names = {rule["name"] for rule in rules if rule["type"] == "alerting"}
    assert names == {rule["alert"] for rule in alert_rules()}
    prometheus.wait_for("instance:weft_train_tokens:rate5m")
    for rule in prometheus.get("rules")["groups"][0]["rules"]:
        assert rule["health"] == "ok", rule
        assert not rule.get("alerts") or rule["name"] in ABOUT_THE_DISK, rule


def test_every_folder_has_a_file_system(prometheus: Prometheus) -> None:
    free = prometheus.query("weft_disk_free_bytes <= weft_disk_size_bytes")
    folders = {series["metric"]["folder"] for series in free}
    assert folders == {"checkpoints", "spill", "state"}
    # The work has saved a checkpoint.
    prometheus.wait_for("weft_checkpoint_store_bytes > 0")
