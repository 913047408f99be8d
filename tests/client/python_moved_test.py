"""Tests how clients find the owner of a state among several servers: MOVED, stale
answers, owners that are gone, and lists of addresses."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import pytest
from conftest import FAST, closed_port
from moving_servers import MovingServers, client_of

import weft
from weft.folders import FILES, STATE_FILE
from weft.route import Route

SECONDS = 4.0  # Within which a client that reached no server gives up.


@pytest.fixture
def servers() -> Iterator[MovingServers]:
    with MovingServers(3) as made:
        yield made


def checkpoint(folder: Path, repeats: int = 200_000) -> bytes:
    """Writes files of a checkpoint, and returns all their bytes in order."""
    contents = {name: name.encode() * repeats for name in (*FILES, STATE_FILE)}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return b"".join(contents.values())


def test_a_call_goes_to_the_owner_and_so_do_later_ones(servers: MovingServers) -> None:
    servers.owner = 2
    with client_of(servers.targets[0]) as client:
        adapter = client.create_adapter("a")
        assert servers.asked == [0, 2]
        adapter.optim_step()
        client.info()
    assert servers.asked == [0, 2, 2, 2]
    assert servers.done == [(1, 2)]


def test_streams_uploads_and_calls_that_are_not_repeated_go_there(
    servers: MovingServers, tmp_path: Path
) -> None:
    servers.owner, data = 1, checkpoint(tmp_path)
    with client_of(servers.targets[0]) as client:
        tokens = [part.tokens[0] for part in client.sample_stream([1])]
    assert (tokens, servers.asked) == ([0, 1, 2], [0, 1])
    with client_of(servers.targets[0]) as client:
        client.upload_checkpoint("a", "c", tmp_path)
    # The upload that was refused may have been read in part, and begins anew.
    assert (servers.uploaded, servers.asked[2:]) == ([data], [0, 1])
    with client_of(servers.targets[0], retry=weft.NO_RETRY) as client:
        client.drain()
    assert servers.asked[4:] == [0, 1]


def test_so_does_an_asyncio_client(servers: MovingServers, tmp_path: Path) -> None:
    servers.owner, data = 1, checkpoint(tmp_path)

    async def run() -> list[int]:
        async with weft.AsyncClient(servers.targets[0], retry=FAST) as client:
            tokens = [part.tokens[0] async for part in client.sample_stream([1])]
            servers.owner = 2
            await client.upload_checkpoint("a", "c", tmp_path)
            servers.owner = 0
            adapter = await client.adapter("a")
            await adapter.optim_step()
            return tokens

    assert asyncio.run(run()) == [0, 1, 2]
    assert servers.uploaded == [data]
    assert servers.asked == [0, 1, 1, 2, 2, 0, 0]
    assert servers.done == [(1, 0)]


def test_asyncio_uploads_go_there_however_soon_they_are_refused(
    servers: MovingServers, tmp_path: Path
) -> None:
    """grpc.aio loses the status of a call that ends while it writes."""
    rounds, servers.owner, data = 120, 1, checkpoint(tmp_path, 20_000)

    async def run() -> None:
        for _ in range(rounds):
            async with weft.AsyncClient(servers.targets[0]) as client:
                await client.upload_checkpoint("a", "c", tmp_path)

    asyncio.run(run())
    assert servers.uploaded == [data] * rounds


def test_after_three_hops_comes_a_pause_and_the_first_address(
    servers: MovingServers,
) -> None:
    """Servers 1 and 2 name each other, until they have learnt who the owner is."""
    servers.owner = 2
    servers.beliefs = {1: servers.targets[2], 2: servers.targets[1]}
    policy = weft.RetryPolicy(initial_delay=0.3, jitter=0)
    timer = threading.Timer(0.2, servers.beliefs.clear)
    with client_of(servers.targets[0], retry=policy) as client:
        timer.start()
        begin = time.monotonic()
        client.info()
    assert time.monotonic() - begin > 0.3
    # Server 0 names 2, which names 1, which names 2. That was the third hop.
    assert servers.asked == [0, 2, 1, 2, 0, 2]


def test_calls_that_are_not_repeated_end_after_three_hops(
    servers: MovingServers,
) -> None:
    servers.beliefs = {0: servers.targets[1], 1: servers.targets[0]}
    with client_of(servers.targets[0], retry=weft.NO_RETRY) as client:
        with pytest.raises(weft.FailedPrecondition) as caught:
            client.info()
        assert caught.value.reason == "MOVED"
        with pytest.raises(weft.FailedPrecondition) as caught:
            list(client.sample_stream([1]))
    assert caught.value.values == {"address": servers.targets[0]}
    assert servers.asked == [0, 1, 0, 1] * 2


def test_a_client_whose_owner_is_gone_asks_the_configured_address(
    servers: MovingServers,
) -> None:
    servers.owner = 1
    with client_of(servers.targets[0]) as client:
        adapter = client.create_adapter("a")
        adapter.optim_step()
        servers.kill(1)
        # Server 0 goes on naming the owner that is gone, and then knows of none.
        threading.Timer(0.2, servers.move, [None]).start()
        threading.Timer(0.4, servers.move, [2]).start()
        adapter.optim_step()
        asked = len(servers.asked)
        adapter.optim_step()
    assert servers.done == [(1, 1), (2, 2), (3, 2)]
    assert servers.asked[asked:] == [2]


def test_a_stream_after_the_owner_is_gone_finds_another(servers: MovingServers) -> None:
    servers.owner = 1
    with client_of(servers.targets[0], retry=weft.NO_RETRY) as client:
        client.info()
        servers.kill(1)
        servers.owner = 2
        # A call on the connection that breaks may have left, and is not repeated.
        with suppress(weft.Unavailable):
            list(client.sample_stream([1]))
        assert len(list(client.sample_stream([1]))) == 3
    assert servers.asked[-1] == 2


def test_steps_in_flight_run_once_while_owners_change(servers: MovingServers) -> None:
    rounds, in_flight, moves = 12, 8, 0
    servers.loses = 7
    ended = threading.Event()

    def train() -> None:
        try:
            with client_of(*servers.targets) as client:
                adapter = client.create_adapter("a")
                for _ in range(rounds):
                    steps = [adapter.submit.optim_step() for _ in range(in_flight)]
                    for step in steps:
                        step.result()
        finally:
            ended.set()

    trainer = threading.Thread(target=train)
    trainer.start()
    for owner in cycle((1, 2, 0)):
        servers.move(owner)
        moves += 1
        if ended.wait(0.01):
            break
    trainer.join()
    assert [number for number, _ in servers.done] == [*range(1, 97)]
    assert moves > 3 and len(Counter(index for _, index in servers.done)) == 3


def test_the_next_address_is_called_if_one_cannot_be_reached(
    servers: MovingServers,
) -> None:
    with closed_port() as gone, closed_port() as away:
        # Each call is the first of its client, and is not repeated.
        for targets in ((gone, servers.targets[0]), (gone, away, servers.targets[0])):
            with client_of(*targets, retry=weft.NO_RETRY) as client:
                client.drain()
                assert len(list(client.sample_stream([1]))) == 3
    assert servers.asked == [0] * 4


def test_the_next_address_is_asked_if_one_knows_no_owner(
    servers: MovingServers,
) -> None:
    servers.owner, servers.beliefs = 2, {0: ""}
    with client_of(*servers.targets[:2]) as client:
        client.info()
    assert servers.asked == [0, 1, 2]


def test_addresses_that_are_all_gone_are_given_up_soon() -> None:
    with closed_port() as gone, closed_port() as away:
        begin = time.monotonic()
        with weft.Client(f"{gone}, {away}") as client:
            text = f"no connection to {gone}, {away}: is weftd running there"
            with pytest.raises(weft.Unavailable, match=text):
                client.info()
    assert time.monotonic() - begin < SECONDS


@pytest.mark.parametrize(
    ("owner", "says"),
    [
        ("192.0.2.1:5", "the token would be sent in plaintext"),
        ("http://host:5", "names no owner's address"),
        ("unix:/run/other", "names no owner's address"),
        ("host:5,other:5", "names no owner's address"),
        ("host:99999", "must be HOST:PORT"),
    ],
)
def test_no_call_goes_to_what_no_owner_can_be(
    servers: MovingServers, owner: str, says: str
) -> None:
    servers.beliefs = {0: owner}
    security = weft.Security(token="weft_secret")
    with client_of(servers.targets[0], security=security) as client:
        with pytest.raises(weft.FailedPrecondition, match=says) as caught:
            client.info()
        assert servers.targets[0] in str(caught.value)
        assert "secret" not in str(caught.value)
        servers.beliefs.clear()
        client.info()


def test_an_answer_that_comes_late_changes_nothing() -> None:
    route = Route("a:1,b:1", weft.Security())
    route.follow("a:1", "c:1")
    route.follow("a:1", "d:1")
    route.leave("a:1")
    assert route.target() == "c:1"
    route.leave("c:1")
    route.leave("c:1")
    assert route.target() == "b:1"


def test_an_owner_that_cannot_be_reached_where_it_says_may_be_in_the_list(
    servers: MovingServers,
) -> None:
    servers.owner = 1
    servers.beliefs = {0: "owner-of-nothing.invalid:5"}
    with client_of(*servers.targets[:2]) as client:
        client.info()
    assert servers.asked[-1] == 1


def test_each_address_of_a_list_is_checked() -> None:
    with pytest.raises(weft.InvalidArgument, match="target is 'b'"):
        weft.Client("a:5,b")
    with pytest.raises(weft.FailedPrecondition, match="plaintext"):
        weft.Client("b:5,c:5", security=weft.Security(token="t"))
