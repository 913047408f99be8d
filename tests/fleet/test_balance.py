"""The logs of a state get about as many adapters each, while clients train some."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest
import stores
from daemon import wait_until
from members import WEFTCTL, Fleet, Member, run_weftctl, weftctl
from stores import Store
from trainers import FLAGS, Trainer, running

import weft

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)

IDLE = 9
RATE = 1.0


def serving(fleet: Fleet, logs: int) -> list[Member]:
    """Returns the owners of logs 0 to logs - 1."""
    for name in "abc"[:logs]:
        fleet.add(name, "--logs", str(logs), *FLAGS).wait_for("serving")
    return fleet.members


def make(member: Member, count: int) -> list[str]:
    names = [f"i{number}" for number in range(count)]
    with member.client() as client:
        for name in names:
            client.create_adapter(name, rank=2)
    return names


def homes(members: list[Member], name: str) -> int:
    return sum(member.facts(name).code == "OK" for member in members)


def names_at(member: Member) -> set[str]:
    """Returns the adapters that are at this very daemon."""
    found = [*(f"i{n}" for n in range(IDLE)), "a0", "a1", "brief"]
    return {name for name in found if member.facts(name).code == "OK"}


def test_idle_adapters_go_to_the_log_with_the_least(
    fleet: Fleet, seaweedfs: Store
) -> None:
    a, b, c = serving(fleet, 3)
    weftctl_drain = ("fleet", "drain", "--server", c.address)
    assert run_weftctl(seaweedfs, *weftctl_drain).returncode == 0
    assert c.wait() == 0
    with a.client() as client:  # The longest unused may not leave.
        client.create_adapter("brief", rank=2, durability="memory")
    idle = make(a, IDLE)
    trainers = [Trainer(0), Trainer(1)]
    with running(a.address, trainers):
        wait_until(lambda: min(trainer.rounds for trainer in trainers) > 0)
        begin = time.monotonic()
        words = ("fleet", "balance", fleet.url, "--rate", str(RATE))
        done = run_weftctl(seaweedfs, *words)
        seconds = time.monotonic() - begin
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("moved ")]
    # Two more train, and one may not leave.
    assert len(lines) == (IDLE + 3) // 2, done.stderr
    assert f"{len(lines)} adapters moved" in done.stderr
    assert seconds > (len(lines) - 1) / RATE
    assert done.stdout == '[{"adapters":6,"log":0},{"adapters":6,"log":1}]\n'
    assert names_at(b) == set(idle[: len(lines)])
    # No adapter comes to a drained log, and what is balanced stays so.
    named = ("state", "verify", fleet.url, "--log", "2")
    assert weftctl(seaweedfs, *named)["adapters"] == 0
    again = run_weftctl(seaweedfs, *words)
    assert again.stderr == "0 adapters moved\n" and again.stdout == done.stdout
    with weft.Client(f"{a.address},{b.address}") as client:
        for trainer in trainers:
            trainer.check(client)


def test_a_log_that_refuses_is_left_out(fleet: Fleet, seaweedfs: Store) -> None:
    a = fleet.add("a", "--logs", "3")
    a.wait_for("serving")
    fleet.add("b", "--logs", "3", "--max-adapters", "1").wait_for("serving")
    c = fleet.add("c", "--logs", "3")
    c.wait_for("serving")
    make(a, 7)
    # A dead server's log is left out, too.
    balance = ("fleet", "balance", fleet.url, "--rate", "100")
    done = run_weftctl(seaweedfs, *balance)
    assert done.returncode == 0, done.stderr
    assert "log 1 is left out" in done.stderr and "--max-adapters" in done.stderr
    assert [len(names_at(member)) for member in fleet.members] == [3, 1, 3]
    make_more(a)
    c.kill()
    done = run_weftctl(seaweedfs, *balance)
    assert done.returncode == 0 and "log 2 is left out" in done.stderr, done.stderr
    for rate in ("0", "-1", "nan", "x"):
        refused = run_weftctl(seaweedfs, *balance[:-1], rate)
        assert refused.returncode == 2 and "--rate" in refused.stderr


def make_more(member: Member) -> None:
    with member.client() as client:
        for number in range(4):
            client.create_adapter(f"more{number}", rank=2)


def test_the_move_under_way_ends_by_itself(fleet: Fleet, seaweedfs: Store) -> None:
    members = serving(fleet, 2)
    idle = make(members[0], IDLE)
    command = [str(WEFTCTL), "fleet", "balance", fleet.url, "--rate", "2"]
    with subprocess.Popen(
        command, env=seaweedfs.environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        # The next one begins soon.
        assert process.stderr.readline().startswith("moved ")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    wait_until(lambda: all(homes(members, name) == 1 for name in idle))
    wait_until(lambda: seaweedfs.sizes(fleet.url, "arrivals/") == {})
    assert 0 < len(names_at(members[1])) < IDLE // 2
