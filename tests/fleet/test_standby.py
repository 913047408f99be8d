"""A standby takes the state over: after a kill, after SIGTERM, and from a process that
was only frozen."""

from __future__ import annotations

import time
from typing import Any

import pytest
import raw
import stores
from durable import train
from members import Fleet, Member, pair

import weft
from weft import methods
from weft._proto import adapters_pb2

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)


def facts(member: Member, adapter_id: str) -> Any:
    request = adapters_pb2.GetAdapterRequest(adapter_id=adapter_id)
    with raw.Raw(member.address) as channel:
        return channel.call(methods.GET_ADAPTER, request)


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
    assert facts(member, "x").reply.adapter.optim_steps == 3


def test_a_standby_names_the_owner(fleet: Fleet) -> None:
    owner, standby = pair(fleet)
    outcome = facts(standby, "x")
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
    assert facts(standby, "x").reply.adapter.optim_steps == 3
    assert seconds < (10 if how == "kill" else 5)


def test_a_zombie_answers_nothing(fleet: Fleet) -> None:
    owner, standby = pair(fleet)
    with owner.client() as client:
        client.create_adapter("x", rank=4, seed=1)
        train(client, "x", 1)
    owner.freeze()
    standby.wait_for("serving")
    with standby.client() as client:
        for seed in range(2, 50):
            train(client, "x", seed)
    owner.thaw()
    with pytest.raises(weft.errors.WeftError), owner.client(timeout=5) as client:
        train(client, "x", 99)
    assert owner.wait() == 4
    assert "instance b has taken the log over" in owner.log_text()
    assert facts(standby, "x").reply.adapter.optim_steps == 49
