"""Adapters of two logs: whichever daemon a call reaches, it gets to the one that has
the adapter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import stores
from durable import train
from members import Fleet, Member

import weft
from weft import methods
from weft._proto import adapters_pb2

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)

LOGS = ("--logs", "2")


def two(fleet: Fleet) -> tuple[Member, Member]:
    """Returns the owners of logs 0 and 1."""
    for name in ("a", "b"):
        fleet.add(name, *LOGS).wait_for("serving")
    a, b = fleet.members
    return a, b


def moved_to(member: Member, adapter: str) -> str:
    """Returns where a daemon sends a call for an adapter of another one."""
    outcome = member.facts(adapter)
    assert outcome.code == "FAILED_PRECONDITION", outcome
    return str(outcome.message)


def test_every_call_finds_its_adapter(fleet: Fleet) -> None:
    a, b = two(fleet)
    for member, name in ((a, "x"), (b, "y")):
        with member.client() as client:
            client.create_adapter(name, rank=4, seed=1)
    assert b.address in moved_to(a, "y") and a.address in moved_to(b, "x")
    # Each kind of call, through the daemon that does not have the adapter.
    with a.client() as client:
        for seed in range(3):
            train(client, "y", seed)
        adapter = client.adapter("y")
        adapter.snapshot("s")
        drawn = adapter.sample([5, 6, 7], max_tokens=4, snapshot="s", ignore_eos=True)
        assert len(drawn.samples[0].tokens) == 4
        streamed = list(adapter.sample_stream([5, 6, 7], max_tokens=4, ignore_eos=True))
        assert streamed
        adapter.release_snapshot("s")
        adapter.report({"reward": 1.0})
        adapter.save("kept")
        assert [one.name for one in client.checkpoints("y")] == ["kept"]
        adapter.export(fleet.folder / "peft")
        adapter.load("kept")
        # What one log has saved, an adapter of the other begins with.
        client.adapter("x").load("kept", source="y")
        assert {one.adapter_id for one in client.adapters()} == {"x", "y"}
    assert b.facts("y").reply.adapter.optim_steps == 3
    assert a.facts("x").reply.adapter.optim_steps == 3
    # The base model is everywhere.
    with b.client() as client:
        drawn = client.sample([5, 6, 7], max_tokens=2, ignore_eos=True)
        assert len(drawn.samples[0].tokens) == 2


def test_a_name_is_one_adapters(fleet: Fleet) -> None:
    a, b = two(fleet)
    # Many create the same names at both at once; each name is made once.
    names = [f"n{number}" for number in range(20)]

    def create(member: Member) -> list[str]:
        made = []
        with member.client() as client:
            for seed, name in enumerate(names):
                try:
                    client.create_adapter(name, rank=2, seed=int(member is a))
                except weft.AlreadyExists:
                    continue
                made.append(name)
                train(client, name, seed)
        return made

    with ThreadPoolExecutor(2) as pool:
        both = [name for made in pool.map(create, (a, b)) for name in made]
    assert sorted(both) == sorted(names)
    for name in names:
        (here,) = [m for m in (a, b) if m.facts(name).code == "OK"]
        assert here.facts(name).reply.adapter.optim_steps == 1

    # A deletion through the other daemon frees the name for anybody.
    with a.client() as client:
        for name in names:
            client.delete_adapter(name)
        assert client.adapters() == []
        assert a.facts("n0").code == b.facts("n0").code == "NOT_FOUND"
    with a.client() as client:  # It does not know who had the names.
        client.create_adapter("n0", rank=2)
    assert a.facts("n0").code == "OK" and a.address in moved_to(b, "n0")
    # What cannot be made leaves no name behind.
    load = adapters_pb2.LoadCheckpointRequest(adapter_id="n1", name="none")
    assert b.call(methods.LOAD_CHECKPOINT, load).code == "NOT_FOUND"
    with b.client() as client, pytest.raises(weft.WeftError):
        client.create_adapter("n1", rank=100_000)
    with a.client() as client:
        client.create_adapter("n1", rank=2)
    assert a.facts("n1").code == "OK"


def test_a_take_over_moves_no_adapter(fleet: Fleet) -> None:
    a, b = two(fleet)
    standby = fleet.add("c", *LOGS)
    standby.wait_for("standby")
    addresses = ",".join(member.listen for member in fleet.members)
    with weft.Client(addresses) as client:
        for member, name in ((a, "x"), (b, "y")):
            with member.client() as own:
                own.create_adapter(name, rank=4, seed=1)
            train(client, name, 0)
        b.kill()
        train(client, "x", 1)  # Of the log that lives.
        train(client, "y", 1)  # Waits for the standby.
        assert standby.address in moved_to(a, "y")
        assert {one.adapter_id for one in client.adapters()} == {"x", "y"}
    assert standby.facts("y").reply.adapter.optim_steps == 2
    assert a.facts("x").reply.adapter.optim_steps == 2


def test_a_log_without_an_owner_hides_nothing(fleet: Fleet) -> None:
    a, b = two(fleet)
    for member, name in ((a, "x"), (b, "y")):
        with member.client() as client:
            client.create_adapter(name, rank=4)
    assert b.stop() == 0
    outcome = a.facts("y")
    assert outcome.code == "UNAVAILABLE", outcome
    listed = a.call(methods.LIST_ADAPTERS, adapters_pb2.ListAdaptersRequest())
    assert listed.code == "UNAVAILABLE" and "log 1 has no server" in listed.message
    # The name stays taken.
    made = a.call(
        methods.CREATE_ADAPTER, adapters_pb2.CreateAdapterRequest(adapter_id="y")
    )
    assert made.code == "UNAVAILABLE", made
