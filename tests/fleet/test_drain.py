"""A daemon gives its log away while clients train its adapters: they go to others, no
call fails, and the daemon comes back as a standby."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import stores
from daemon import wait_until
from members import Fleet, Member, run_weftctl, weftctl
from stores import Store
from test_chaos import calm_ends, ends
from trainers import CALL_SECONDS, FLAGS, RETRY, Sampler, Trainer, running

import weft

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)

TRAINERS = 6


class Maker(Sampler):
    """Makes adapters at the daemon that drains, as long as that is there."""

    def __init__(self) -> None:
        super().__init__("new")
        self.made = 0

    def run(self, target: str, done: threading.Event) -> None:
        with weft.Client(target, timeout=CALL_SECONDS, retry=RETRY) as client:
            while not done.is_set():
                client.create_adapter(f"{self.adapter_id}{self.made}", rank=2)
                self.made += 1
                time.sleep(0.1)


def state_of(store: Store, fleet: Fleet, log: int) -> str:
    (found,) = (
        entry
        for entry in weftctl(store, "fleet", "list", fleet.url)
        if entry["log"] == log
    )
    return str(found["state"])


def has_one(member: Member, trainers: list[Trainer]) -> bool:
    return any(member.facts(t.adapter_id).code == "OK" for t in trainers)


def test_a_drained_daemon_comes_back_as_a_standby(
    fleet: Fleet, seaweedfs: Store, tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        fleet.add(name, "--logs", "3", *FLAGS).wait_for("serving")
    drained = fleet.members[1]
    log = drained.served_log()
    assert log is not None
    addresses = ",".join(member.address for member in fleet.members)
    trainers = [Trainer(index) for index in range(TRAINERS)]
    maker = Maker()
    # Each worker begins with another daemon, and the last one with this.
    at_drained = f"{drained.address},{addresses}"
    with running(addresses, trainers), running(at_drained, [maker]):
        wait_until(lambda: min(trainer.rounds for trainer in trainers) > 0)
        assert has_one(drained, trainers)
        with weft.Client(drained.address) as client:
            # What it keeps to sample from is no adapter that has to go.
            wait_until(lambda: trainers[0].rounds > 2)
            client.checkpoint("a0", "s0").sample([1, 2, 3], max_tokens=2)
        done = run_weftctl(seaweedfs, "fleet", "drain", "--server", drained.address)
        assert done.returncode == 0, done.stderr
        assert drained.wait() == 0, drained.log_tail()
        # In place, as a supervisor starts it. Its own log is not for it, either.
        drained.launch()
        drained.wait_for("standby")
        assert state_of(seaweedfs, fleet, log) == "drained"
        before = [trainer.rounds for trainer in trainers]
        wait_until(
            lambda: all(
                trainer.rounds > rounds + 1
                for trainer, rounds in zip(trainers, before, strict=True)
            )
        )
    named = ("--log", str(log))
    assert weftctl(seaweedfs, "state", "verify", fleet.url, *named)["adapters"] == 0
    with weft.Client(addresses) as client:
        for trainer in trainers:
            trainer.check(client)
        names = {info.adapter_id for info in client.adapters()}
        assert {f"new{number}" for number in range(maker.made)} <= names
        found = ends(trainers, client, tmp_path / "ends")
    assert found == calm_ends(tmp_path / "calm", trainers, None)
    undrained = run_weftctl(seaweedfs, "fleet", "undrain", fleet.url, *named)
    assert undrained.returncode == 0, undrained.stderr
    drained.wait_for("serving")
    assert drained.served_log() == log


def test_what_cannot_leave_keeps_the_daemon(fleet: Fleet, seaweedfs: Store) -> None:
    for name in ("a", "b"):
        fleet.add(name, "--logs", "2").wait_for("serving")
    server = fleet.members[0]
    with weft.Client(server.address) as client:
        client.create_adapter("brief", rank=2, durability="memory")
        drain = ("fleet", "drain", "--server", server.address)
        refused = run_weftctl(seaweedfs, *drain)
        assert refused.returncode == 1
        assert "'brief' cannot leave this log" in refused.stderr
        # It goes on as if nothing had been asked.
        client.create_adapter("next", rank=2)
        assert server.facts("next").code == "OK"
