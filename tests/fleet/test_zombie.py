"""An owner that was only frozen wakes after another daemon has gone on, and cut the
log. It answers nothing and ends. What stops it is a seal in the log alone: its beats
are held, and without the seal it answers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import stores
from daemon import wait_until
from durable import train
from fault_proxy import FaultProxy
from members import Fleet, Member

import weft

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)

RECORDS = "logs/0/records/"
SEAL_BYTES = 36  # Every other object is larger (log_object.h).
STEPS = 50
# A few steps fill the log, so the 50 steps cut it several times.
FLAGS = ("--snapshot-log-bytes", "10000")
# With its beats an owner may notice earlier that another one has its state.
BEATS = re.compile(rb"PUT [^ ]*/owners/0 ")


def seals(objects: dict[str, int]) -> list[str]:
    return [key for key, size in objects.items() if size == SEAL_BYTES]


def following(place: str) -> str:
    return f"{int(place) + 1:0{len(place)}}"


class Frozen:
    """A frozen owner "a" with one step, and an owner "b" that has gone on since, and
    has cut the log."""

    def __init__(self, fleet: Fleet, store: stores.Store, proxy: FaultProxy) -> None:
        self.store, self.proxy, self.fleet = store, proxy, fleet
        environment = store.environment(proxy.url)
        self.zombie = fleet.add("a", *FLAGS, environment=environment)
        self.zombie.wait_for("serving")
        self.owner = fleet.add("b", *FLAGS)
        self.owner.wait_for("standby")
        with self.zombie.client() as client:
            client.create_adapter("x", rank=4, seed=1)
            train(client, "x", 0)
        proxy.held = BEATS
        self.zombie.freeze()
        self.places = sorted(self.objects())
        self.owner.wait_for("serving")
        with self.owner.client() as client:
            for seed in range(1, STEPS):
                train(client, "x", seed)
        wait_until(self.is_cut, "the log was not cut")

    def objects(self) -> dict[str, int]:
        return self.store.sizes(self.fleet.url, RECORDS)

    def is_cut(self) -> bool:
        """Returns whether the records that the zombie knows are gone."""
        found = self.objects()
        return not [key for key in self.places if found.get(key, 0) > SEAL_BYTES]

    def wake(self) -> str:
        """Asks the zombie for a step as it wakes. Returns the code of its answer."""
        with weft.Client(self.zombie.address, timeout=5, retry=weft.NO_RETRY) as client:
            self.zombie.thaw()
            try:
                client.adapter("x").optim_step(learning_rate=1e-2)
            except weft.WeftError as error:
                return error.code
            return "OK"

    def expect_end(self) -> None:
        """The zombie must end, and the acknowledged steps of its successor must be all
        that there is."""
        self.proxy.held = None
        assert self.zombie.wait() == 4
        assert "instance b has taken the log over" in self.zombie.log_text()
        for member in (self.owner, self._restarted()):
            assert member.facts("x").reply.adapter.optim_steps == STEPS

    def _restarted(self) -> Member:
        self.owner.kill()
        self.owner.launch()
        self.owner.wait_for("serving")
        self.owner.wait_until_restored()
        return self.owner


@pytest.fixture
def frozen(fleet: Fleet, seaweedfs: stores.Store) -> Iterator[Frozen]:
    with FaultProxy(seaweedfs.endpoint) as proxy:
        yield Frozen(fleet, seaweedfs, proxy)


def test_a_zombie_answers_nothing(frozen: Frozen) -> None:
    found = frozen.objects()
    # Its own seal and that of its successor, which is where it goes on to write.
    assert seals(found) == [frozen.places[0], following(frozen.places[-1])]
    assert frozen.wake() != "OK"
    frozen.expect_end()


def test_without_its_seal_a_zombie_answers_what_nobody_finds(frozen: Frozen) -> None:
    frozen.store.delete(
        frozen.fleet.url, [RECORDS + key for key in seals(frozen.objects())]
    )
    assert frozen.wake() == "OK"
    frozen.expect_end()
