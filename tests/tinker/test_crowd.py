"""Tests many clients at once, connections that break, and tenants."""

from __future__ import annotations

import math
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from flaky_proxy import FlakyProxy
from raw_client import RawClient
from slow_proxy import SlowProxy
from tinker_daemon import WEFTCTL, TinkerDaemon
from tinker_sdk import SDK

SAMPLES = re.compile(r'^weft_queue_depth{kind="sample"} (\d+)', re.MULTILINE)


@pytest.fixture(autouse=True)
def has_sdk() -> None:
    if not SDK.exists():
        pytest.skip("no Tinker SDK: deploy/setup.sh --tests installs it")


def test_clients_and_samples_beyond_the_queue_wait(tmp_path: Path) -> None:
    server = TinkerDaemon(
        tmp_path,
        *("--max-queue-requests", "16", "--max-queue-requests-per-tenant", "8"),
        # Two samples at once take long enough that even a slow client fills the queue.
        *("--max-decode-sequences", "2", "--max-adapters", "40"),
        # The SDK polls for each sample on a connection of its own.
        *("--max-connections", "24"),
    )
    try:
        other, health, depths = RawClient(server), [], [0]
        server.begin("crowd")
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(server.result)
            while not result.done():
                health.append(other.ask("healthz", method="GET")[0])
                depths += map(int, SAMPLES.findall(server.server.scrape()))
                time.sleep(0.05)
            out = result.result()
        page = server.server.scrape()
    finally:
        server.stop()
    assert max(depths) > 16
    assert 'rejected_total{reason="queue_full"} 0' in page
    assert len(health) > 10 and set(health) == {200}
    assert out["lengths"] == [8]
    assert len(out["norms"]) == 32
    # The norms differ by rounding, which depends on the requests in a batch.
    assert out["norms"] == pytest.approx([out["norms"][0]] * 32, rel=1e-5)
    assert math.isfinite(out["norms"][0]) and out["norms"][0] > 0


def test_connections_that_break_change_nothing(tmp_path: Path) -> None:
    server = TinkerDaemon(tmp_path)
    try:
        calm = server.run("calm")
        server.end_sdk()
        proxy = FlakyProxy(server.url)
        server.sdk_url = proxy.url
        assert server.run("calm") == calm
        proxy.close()
    finally:
        server.stop()
    assert proxy.broken > 3


def test_the_sdk_waits_for_slow_results_in_silence(tmp_path: Path) -> None:
    server = TinkerDaemon(tmp_path)
    proxy = SlowProxy(server.url)
    server.sdk_url = proxy.url
    try:
        out = server.run("quiet")
    finally:
        server.stop()
        proxy.close()
    # A model, six times two steps, a save and a sample.
    assert len(proxy.polled) >= 14
    assert out["warnings"] == [] and len(out["norms"]) == 6


def test_tenants_see_their_own(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"

    def token(name: str, *options: str) -> str:
        made = subprocess.run(
            [str(WEFTCTL), "token", "create", name] + ["--file", str(tokens), *options],
            check=True,
            capture_output=True,
            text=True,
        )
        return "tml-" + made.stdout.split()[0]

    alice, bob = token("a", "--tenant", "alice"), token("b", "--tenant", "bob")
    reader = token("r", "--tenant", "alice", "--scopes", "read")
    server = TinkerDaemon(tmp_path, "--auth-tokens-file", str(tokens))
    try:
        one, other = RawClient(server, alice), RawClient(server, bob)
        session = one.session()
        model = one.model(session)
        body = {"model_id": model, "seq_id": 1, "adam_params": {}}
        assert other.ask("optim_step", body)[0] == 404
        assert other.ask(f"sessions/{session}", method="GET")[0] == 404
        assert RawClient(server, reader).ask("optim_step", body)[0] == 403
        future = one.train(model, 1)
        assert other.ask("retrieve_future", future)[0] == 410
        assert "metrics" in one.result(future)
        # The other tenant can train a model of its own.
        assert other.norm(other.step(other.model(other.session()), 1)) >= 0
    finally:
        server.stop()
