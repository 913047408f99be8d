"""A state with two logs: two daemons serve, and a third one stands by for both."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import stores
from durable import train
from members import Fleet, Member, run_weftctl, weftctl
from stores import Store

from weft import methods
from weft._proto import sampling_pb2

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)

LOGS = ("--logs", "2")
EPOCH, LOG = "weft_state_epoch", "weft_state_log"


def owner(fleet: Fleet, name: str, adapter: str) -> Member:
    """Returns a daemon that has a log, and an adapter with three steps."""
    member = fleet.add(name, *LOGS)
    member.wait_for("serving")
    with member.client() as client:
        client.create_adapter(adapter, rank=4, seed=1)
        for seed in range(3):
            train(client, adapter, seed)
    return member


def steps(member: Member, adapter: str) -> int:
    return int(member.facts(adapter).reply.adapter.optim_steps)


@contextmanager
def training(member: Member, adapter: str) -> Iterator[list[float]]:
    """Trains until the end. Yields the times at which steps have ended."""
    stop = threading.Event()
    ends: list[float] = []

    def work() -> None:
        with member.client() as client:
            while not stop.is_set():
                train(client, adapter, len(ends))
                ends.append(time.monotonic())

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield ends
    finally:
        stop.set()
        worker.join()


def test_a_standby_takes_over_from_whichever_owner_ends(
    fleet: Fleet, seaweedfs: Store
) -> None:
    a = owner(fleet, "a", "x")
    b = owner(fleet, "b", "y")
    c = fleet.add("c", *LOGS)
    c.wait_for("standby")
    assert [member.value(LOG) for member in (a, b, c)] == [0, 1, -1]
    outcome = c.facts("x")
    assert outcome.code == "FAILED_PRECONDITION", outcome
    assert a.address in outcome.message or b.address in outcome.message
    logs = weftctl(seaweedfs, "fleet", "list", fleet.url)
    assert [log["log"] for log in logs] == [0, 1]
    assert [log["owner"] for log in logs] == ["a", "b"]
    assert [log["address"] for log in logs] == [a.address, b.address]
    assert {log["state"] for log in logs} == {"alive"}

    epoch = b.value(EPOCH)
    with training(b, "y") as ends:
        start = time.monotonic()
        a.kill()
        c.wait_for("serving")
        c.wait_until_restored()
        seconds = time.monotonic() - start
    print(f"{seconds:.2f} s, {len(ends)} steps of the other log")
    assert seconds < 15
    pauses = [later - earlier for earlier, later in pairwise(ends)]
    assert max(pauses) < 3, "the other log's owner stood still"
    assert c.value(LOG) == 0 and c.value(EPOCH) > 1
    assert steps(c, "x") == 3
    assert b.value(EPOCH) == epoch and steps(b, "y") == 3 + len(ends)
    assert b.address in c.facts("y").message
    assert c.address in b.facts("x").message

    a.launch()
    a.wait_for("standby")
    b.terminate()
    a.wait_for("serving")
    a.wait_until_restored()
    assert a.value(LOG) == 1
    assert steps(a, "y") == 3 + len(ends)
    # Adapters of two logs may have one key, so their steps are noted apart.
    noted = sorted(path.name for path in (fleet.folder / "a").rglob("RUNNING*"))
    assert noted == ["RUNNING-a", "RUNNING-a~1"]
    with c.client() as client:
        train(client, "x", 3)
        client.adapter("x").save("kept")
    with a.client() as client:
        client.create_adapter("z", rank=4).load("kept", source="x")
    assert steps(a, "z") == 4


def drawn(member: Member, name: str) -> Any:
    """Returns the outcome of a sample from a checkpoint of x at this very daemon."""
    request = sampling_pb2.SampleRequest(
        adapter_id="x",
        checkpoint=name,
        prompt=range(5, 30),
        config=sampling_pb2.SamplingConfig(seed=7, max_tokens=8),
    )
    return member.call(methods.SAMPLE, request)


def test_each_owner_samples_from_all_checkpoints(
    fleet: Fleet, seaweedfs: Store
) -> None:
    a = owner(fleet, "a", "x")
    b = owner(fleet, "b", "y")
    with a.client() as client:
        adapter = client.adapter("x")
        adapter.save("c", kind="sampler")
        adapter.snapshot("c")
    request = sampling_pb2.SampleRequest(
        adapter_id="x",
        snapshot="c",
        prompt=range(5, 30),
        config=sampling_pb2.SamplingConfig(seed=7, max_tokens=8),
    )
    expected = a.call(methods.SAMPLE, request).reply.samples
    assert b.call(methods.SAMPLE, request).code == "FAILED_PRECONDITION"  # MOVED
    for member in (a, b):
        outcome = drawn(member, "c")
        assert outcome.code == "OK", outcome
        assert list(outcome.reply.samples) == list(expected)
        assert drawn(member, "none").code == "NOT_FOUND"
    with a.client() as client:
        train(client, "x", 3)
        client.adapter("x").save("c", kind="sampler", overwrite=True)
    changed = drawn(a, "c")
    assert changed.reply.version == 5
    time.sleep(1.1)  # The other one may see it so much later.
    again = drawn(b, "c")
    assert list(again.reply.samples) == list(changed.reply.samples) != list(expected)
    with b.client() as client:  # Nobody has the adapter now.
        a.kill()
        assert list(drawn(b, "c").reply.samples) == list(again.reply.samples)
        assert client.checkpoint("x", "c").sample([1, 2, 3], max_tokens=2)


def test_weftctl_reads_the_log_that_is_named(
    fleet: Fleet, seaweedfs: Store, tmp_path: Path
) -> None:
    a = owner(fleet, "a", "x")
    assert weftctl(seaweedfs, "state", "verify", fleet.url)["adapters"] == 1
    b = owner(fleet, "b", "y")
    with b.client() as client:
        client.create_adapter("z", rank=4)
    for words in (("verify", fleet.url), ("backup", fleet.url, tmp_path / "none")):
        refused = run_weftctl(seaweedfs, "state", *words)
        assert refused.returncode == 2
        assert "has the logs 0, 1: name one with --log" in refused.stderr
    assert not (tmp_path / "none").exists()
    refused = run_weftctl(seaweedfs, "state", "verify", fleet.url, "--log", "2")
    assert refused.returncode == 1
    assert "has the logs 0, 1, and not 2" in refused.stderr
    for log, adapters in ((0, 1), (1, 2)):
        named = ("--log", log)
        found = weftctl(seaweedfs, "state", "verify", fleet.url, *named)
        assert found["adapters"] == adapters

    backup, copy = tmp_path / "backup", seaweedfs.url
    weftctl(seaweedfs, "state", "backup", fleet.url, backup, "--log", 1)
    refused = run_weftctl(seaweedfs, "state", "restore", backup, copy, "--log", "1")
    assert refused.returncode == 2 and "--log: a folder has one log" in refused.stderr
    refused = run_weftctl(seaweedfs, "state", "restore", backup, fleet.url)
    assert refused.returncode == 1 and "is there" in refused.stderr
    assert a.stop() == b.stop() == 0
    weftctl(seaweedfs, "state", "restore", fleet.url, copy, "--log", 1)
    for place in (backup, copy):
        assert weftctl(seaweedfs, "state", "verify", place)["adapters"] == 2
    (log,) = weftctl(seaweedfs, "fleet", "list", copy)
    assert log["log"] == 0 and log["state"] == "released"
