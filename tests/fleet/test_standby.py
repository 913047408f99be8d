"""A standby takes the state over, after a kill and after SIGTERM."""

from __future__ import annotations

import time

import pytest
import stores
from durable import train
from members import Fleet, pair

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)


def test_a_restart_goes_on(fleet: Fleet) -> None:
    member = fleet.add("a")
    member.wait_for("serving")
    with member.client() as client:
        client.create_adapter("x", rank=4, seed=1)
        for seed in range(3):
            train(client, "x", seed)
    member.kill()
    member.launch()
    member.wait_for("serving")
    member.wait_until_restored()
    assert member.facts("x").reply.adapter.optim_steps == 3


def test_a_standby_names_the_owner(fleet: Fleet) -> None:
    owner, standby = pair(fleet)
    outcome = standby.facts("x")
    assert outcome.code == "FAILED_PRECONDITION", outcome
    assert owner.address in outcome.message


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_a_standby_goes_on(fleet: Fleet, how: str) -> None:
    owner, standby = pair(fleet)
    with owner.client() as client:
        client.create_adapter("x", rank=4, seed=1)
        for seed in range(3):
            train(client, "x", seed)
    start = time.monotonic()
    owner.kill() if how == "kill" else owner.terminate()
    standby.wait_for("serving")
    standby.wait_until_restored()
    seconds = time.monotonic() - start
    print(how, f"{seconds:.2f} s")
    assert standby.facts("x").reply.adapter.optim_steps == 3
    assert seconds < (10 if how == "kill" else 5)


def test_a_standby_of_two_ranks_goes_on(fleet: Fleet) -> None:
    owner, standby = pair(fleet, "--tensor-parallel-size", "2")
    with owner.client() as client:
        client.create_adapter("x", rank=4, seed=1)
        for seed in range(3):
            train(client, "x", seed)
        client.adapter("x").save("kept")
    owner.kill()
    standby.wait_for("serving")
    standby.wait_until_restored()
    assert standby.facts("x").reply.adapter.optim_steps == 3
    with standby.client() as client:
        train(client, "x", 3)
        client.create_adapter("y", rank=4).load("kept", source="x")
    assert standby.facts("y").reply.adapter.optim_steps == 3
