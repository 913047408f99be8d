"""Tests many clients at once, connections and servers that break, and tenants."""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from flaky_proxy import FlakyProxy
from raw_client import RawClient
from slow_proxy import SlowProxy
from tinker_daemon import WEFTCTL, TinkerDaemon

Proxy = TypeVar("Proxy", FlakyProxy, SlowProxy)
SAMPLES = re.compile(r'^weft_queue_depth{kind="sample"} (\d+)', re.MULTILINE)


@contextmanager
def through(server: TinkerDaemon, proxy: Proxy) -> Iterator[Proxy]:
    """The SDK uses the proxy inside."""
    server.sdk_url = proxy.url
    try:
        yield proxy
    finally:
        server.sdk_url = server.url
        proxy.close()


@pytest.fixture(scope="module")
def calm(server: TinkerDaemon) -> Any:
    """What a program returns that nothing disturbs."""
    return server.run("calm")


# This test is the first, because earlier clients of the SDK's process might warn.
def test_the_sdk_waits_for_slow_results_in_silence(server: TinkerDaemon) -> None:
    with through(server, SlowProxy(server.url)) as proxy:
        out = server.run("quiet")
    # A model, six times two steps, a save and a sample.
    assert len(proxy.polled) >= 14
    assert out["warnings"] == [] and len(out["norms"]) == 6


def test_connections_that_break_change_nothing(server: TinkerDaemon, calm: Any) -> None:
    with through(server, FlakyProxy(server.url)) as proxy:
        assert server.run("calm") == calm
    assert proxy.broken > 3


def test_training_goes_on_after_the_server_is_killed(
    server: TinkerDaemon, calm: Any
) -> None:
    server.begin("survive")
    for _ in range(3):
        assert server.next_line() == "kill"
        server.server.kill()
        server.server.start()
    assert server.result() == calm


def test_clients_and_samples_of_a_crowd_wait(
    server: TinkerDaemon, tmp_path: Path
) -> None:
    with TinkerDaemon(
        tmp_path,
        # A sample at a time takes long enough that even a slow client fills the queue.
        *("--max-decode-sequences", "1", "--max-adapters", "40"),
        # The SDK polls for each sample on a connection of its own.
        *("--max-connections", "24"),
    ) as small:
        other, health, depths = RawClient(small), [], [0]
        small.begin("crowd")
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(small.result)
            while not result.done():
                health.append(other.ask("healthz", method="GET")[0])
                depths += map(int, SAMPLES.findall(small.server.scrape()))
                time.sleep(0.05)
            out = result.result()
        page = small.server.scrape()
    assert max(depths) > 16
    assert 'rejected_total{reason="quota"} 0' in page
    assert len(health) > 10 and set(health) == {200}
    assert out["lengths"] == [16]
    assert len(out["norms"]) == 32
    # The norms differ by rounding, which depends on the requests in a batch.
    assert out["norms"] == pytest.approx([out["norms"][0]] * 32, rel=1e-5)
    assert math.isfinite(out["norms"][0]) and out["norms"][0] > 0


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
    with TinkerDaemon(tmp_path, "--auth-tokens-file", str(tokens)) as server:
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
