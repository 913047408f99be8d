"""Adapters move from one log to another while clients train them: no call fails, and
the weights are those of a run without moves. test_chaos.py also kills daemons."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import stores
from daemon import wait_until
from durable import train
from members import Fleet, run_weftctl
from stores import Store
from test_chaos import calm_ends, ends
from test_directory import moved_to
from trainers import FLAGS, Trainer, running

import weft

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)

MOVES = 10
MOST_PAUSE = 1.0  # Seconds, the median.


class TimedTrainer(Trainer):
    """Notes when its rounds ended."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.ends: list[float] = []

    def _round(self, adapter: object) -> None:
        super()._round(adapter)
        self.ends.append(time.monotonic())

    def longest(self, begin: float, end: float) -> float:
        """Returns the longest time between two rounds' ends that overlaps the time from
        `begin` to `end`."""
        pairs = zip(self.ends, self.ends[1:], strict=False)
        return max(b - a for a, b in pairs if b > begin and a < end)


def wait_for_more(count: Callable[[], int], more: int = 1) -> None:
    before = count()
    wait_until(lambda: count() >= before + more)


def test_a_client_trains_while_its_adapter_moves(fleet: Fleet, tmp_path: Path) -> None:
    for name in ("a", "b"):
        fleet.add(name, "--logs", "2", *FLAGS).wait_for("serving")
    a, b = fleet.members
    addresses = f"{a.address},{b.address}"
    trainers: list[Trainer] = [TimedTrainer(0), TimedTrainer(1)]
    moves = []
    with running(addresses, trainers), weft.Client(addresses) as client:
        wait_until(lambda: min(trainer.rounds for trainer in trainers) > 1)
        log = 0 if a.facts("a0").code == "OK" else 1
        for _ in range(MOVES):
            log = 1 - log
            begin = time.monotonic()
            client.move_adapter("a0", log)
            moves.append((begin, time.monotonic()))
            wait_for_more(lambda: trainers[0].rounds, 3)
    moved, calm = trainers
    assert isinstance(moved, TimedTrainer) and isinstance(calm, TimedTrainer)
    with weft.Client(addresses) as client:
        for trainer in trainers:
            trainer.check(client)
        assert sum(m.facts("a0").code == "OK" for m in (a, b)) == 1
        found = ends(trainers, client, tmp_path / "ends")
        for trainer in trainers:
            trainer.check_saves(client)
    undisturbed = calm_ends(tmp_path / "calm", trainers, None)
    assert found == undisturbed
    rounds = [b - a for a, b in zip(calm.ends, calm.ends[1:], strict=False)]
    usual = statistics.median(rounds)
    pauses = sorted(moved.longest(*move) - usual for move in moves)
    print(
        f"{MOVES} moves: a client waits {statistics.median(pauses):.2f} s (median; "
        f"{pauses[0]:.2f} to {pauses[-1]:.2f}) more than the {usual:.2f} s of a round;"
        f" a move takes {statistics.median(e - b for b, e in moves):.2f} s"
    )
    assert statistics.median(pauses) < MOST_PAUSE


def test_what_cannot_move_stays_and_says_why(fleet: Fleet, seaweedfs: Store) -> None:
    a = fleet.add("a", "--logs", "2")
    a.wait_for("serving")
    b = fleet.add("b", "--logs", "2", "--max-adapters-per-tenant", "1")
    b.wait_for("serving")
    with a.client() as client:
        client.create_adapter("x", rank=4, tenant="t")
    with b.client() as client:
        client.create_adapter("y", rank=4, tenant="t")
    with a.client() as client:
        with pytest.raises(weft.FailedPrecondition, match="max-adapters-per-tenant"):
            client.move_adapter("x", 1)
        with pytest.raises(weft.NotFound):
            client.move_adapter("none", 1)
        with pytest.raises(weft.InvalidArgument, match="--logs=2"):
            client.move_adapter("x", 2)
        train(client, "x", 0)
        client.delete_adapter("y")
    # From here on there is room, and the operator uses the command.
    move = ("fleet", "move", "x", "--server", a.address)
    for _ in range(2):  # The second one follows the adapter.
        moved = run_weftctl(seaweedfs, *move, "--to", "1")
        assert moved.returncode == 0, moved.stderr
    assert b.address in moved_to(a, "x")
    assert b.facts("x").reply.adapter.optim_steps == 1
    refused = run_weftctl(seaweedfs, *move)
    assert refused.returncode != 0 and "--to" in refused.stderr
