"""Tests how clients find the owner of each adapter among servers that have some
adapters each, and list the adapters of all."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Patch, closed_port
from moving_servers import MovingServers, client_of

import weft
from weft import route
from weft.folders import FILES, STATE_FILE
from weft.route import Route

SECONDS = 6.0  # Within which a listing gives up a server that it does not reach.
Open = Callable[..., Any]


@pytest.fixture
def servers() -> Iterator[MovingServers]:
    with MovingServers(3) as made:
        yield made


@pytest.fixture(params=["sync", "aio"])
def opened(request: pytest.FixtureRequest) -> Open:
    """Returns what opens a client of the one kind or the other."""

    @asynccontextmanager
    async def asyncio_client(target: str, **options: Any) -> AsyncIterator[Any]:
        async with weft.AsyncClient(target, timeout=20.0, **options) as client:
            yield client

    @asynccontextmanager
    async def synchronous_client(target: str, **options: Any) -> AsyncIterator[Any]:
        with client_of(target, **options) as client:
            yield client

    return asyncio_client if request.param == "aio" else synchronous_client


async def done(result: Any) -> Any:
    """Returns the result of a call of either client."""
    return await result if inspect.isawaitable(result) else result


async def tokens(stream: Any) -> list[int]:
    if hasattr(stream, "__aiter__"):
        return [part.tokens[0] async for part in stream]
    return [part.tokens[0] for part in stream]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def wait() -> None:
        await scenario()

    asyncio.run(wait())


def test_calls_for_each_adapter_go_to_its_owner_after_the_first(
    servers: MovingServers, opened: Open
) -> None:
    servers.homes = {"a": 0, "b": 1}

    async def scenario() -> None:
        async with opened(servers.targets[0]) as client:
            a = await done(client.create_adapter("a"))
            b = await done(client.create_adapter("b"))
            assert servers.asked == [0, 0, 1]
            for adapter in (a, b, a, b):
                await done(adapter.optim_step())
            assert await tokens(b.sample_stream([1])) == [0, 1, 2]
            assert await tokens(a.sample_stream([1])) == [0, 1, 2]
            await done(client.info())

    run(scenario)
    assert servers.asked[3:] == [0, 1, 0, 1, 1, 0, 0]
    assert servers.done == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_streams_and_uploads_find_the_owner_of_their_adapter(
    servers: MovingServers, opened: Open, tmp_path: Path
) -> None:
    servers.homes = {"b": 1, "c": 2}
    for name in (*FILES, STATE_FILE):
        (tmp_path / name).write_bytes(b"bytes")

    async def scenario() -> None:
        async with opened(servers.targets[0], retry=weft.NO_RETRY) as client:
            adapter = await done(client.adapter("b"))
            servers.homes["b"] = 2
            assert await tokens(adapter.sample_stream([1])) == [0, 1, 2]
            for _ in range(2):
                await done(client.upload_checkpoint("c", "one", tmp_path))

    run(scenario)
    assert servers.asked == [0, 1, 1, 2, 0, 2, 2]
    assert len(servers.uploaded) == 2


def test_all_calls_follow_a_server_that_stands_by(
    servers: MovingServers, opened: Open
) -> None:
    servers.owner, servers.homes = 1, {"b": 2}

    async def scenario() -> None:
        async with opened(servers.targets[0]) as client:
            for adapter_id in ("a", "b", "c", "b"):
                await done(client.adapter(adapter_id))
            await done(client.info())

    run(scenario)
    assert servers.asked == [0, 1, 1, 2, 1, 2, 1]


def test_only_the_adapters_of_a_server_that_is_gone_are_asked_for_again(
    servers: MovingServers, opened: Open
) -> None:
    servers.homes = {"a": 1, "b": 2, "c": 1}

    async def scenario() -> None:
        async with opened(servers.targets[0]) as client:
            a, b, c = [await done(client.adapter(one)) for one in "abc"]
            servers.kill(1)
            servers.homes.update(a=2, c=2)
            servers.asked.clear()
            for adapter in (b, a, c, b, a, c):
                await done(adapter.optim_step())
            await done(client.info())

    run(scenario)
    # Server 0 names the new owner of `a` and `c` once each.
    assert servers.asked == [2, 0, 2, 0, 2, 2, 2, 2, 0]


def test_after_three_hops_come_a_pause_and_the_first_address(
    servers: MovingServers, opened: Open
) -> None:
    """Servers 1 and 2 name each other for an adapter that 0 believes to be at 2."""
    servers.homes = {"a": 2}
    servers.beliefs = {1: servers.targets[2], 2: servers.targets[1]}
    policy = weft.RetryPolicy(initial_delay=0.3, jitter=0)
    begin = time.monotonic()
    timer = threading.Timer(0.2, servers.beliefs.clear)

    async def scenario() -> None:
        async with opened(servers.targets[0], retry=policy) as client:
            timer.start()
            await done(client.adapter("a"))
            await done(client.info())

    run(scenario)
    assert time.monotonic() - begin > 0.3
    assert servers.asked == [0, 2, 1, 2, 0, 2, 0]


def test_a_route_forgets_an_address_for_all_adapters_that_were_sent_there() -> None:
    way = Route("a:1,b:1", weft.Security())
    for adapter_id, owner in {"x": "c:1", "y": "d:1", "z": "c:1"}.items():
        way.follow("a:1", owner, adapter_id, alone=True)
    way.leave("c:1")
    at = [way.target(one) for one in ("x", "y", "z", "")]
    assert at == ["a:1", "d:1", "a:1", "a:1"]
    way.leave("a:1")
    at = [way.target(one) for one in ("x", "y", "z", "")]
    assert at == ["b:1", "d:1", "b:1", "b:1"]


def test_a_late_answer_for_an_adapter_changes_nothing() -> None:
    way = Route("a:1", weft.Security())
    way.follow("a:1", "c:1", "x", alone=True)
    way.follow("a:1", "d:1", "x", alone=True)
    assert (way.target("x"), way.target()) == ("c:1", "a:1")


def test_a_route_remembers_a_bounded_number_of_adapters(monkeypatch: Patch) -> None:
    monkeypatch.setattr(route, "MAX_ADAPTERS", 3)
    way = Route("a:1", weft.Security())
    for adapter_id in "uvw":
        way.follow("a:1", "c:1", adapter_id, alone=True)
    way.follow("c:1", "d:1", "u", alone=True)  # It is the newest now.
    way.follow("a:1", "c:1", "x", alone=True)
    at = {adapter_id: way.target(adapter_id) for adapter_id in "uvwx"}
    assert at == {"u": "d:1", "v": "a:1", "w": "c:1", "x": "c:1"}


def two_lists(servers: MovingServers) -> None:
    """Servers 0 and 1 have some adapters each, in pages, and name each other."""
    servers.homes = {"a": 0, "b": 1}
    servers.pages = {0: [["c"], ["e"]], 1: [["b"], ["d"]]}
    servers.others = {0: [servers.targets[1]] * 2, 1: [servers.targets[0]]}


async def ids(client: Any) -> list[str]:
    return [info.adapter_id for info in await done(client.adapters())]


def test_a_list_has_the_adapters_of_all_servers(
    servers: MovingServers, opened: Open
) -> None:
    two_lists(servers)

    async def scenario() -> None:
        async with opened(servers.targets[0]) as client:
            assert await ids(client) == ["b", "c", "d", "e"]
            # The client's own calls stay where they were.
            await done(client.info())

    run(scenario)
    assert servers.asked == [0, 0, 1, 1, 0]


def test_a_list_follows_a_server_that_stands_by_and_hears_of_a_third(
    servers: MovingServers, opened: Open
) -> None:
    """Server 0 still names 2, which stands by now and names 0 itself."""
    two_lists(servers)
    servers.others[0] = [servers.targets[2]]

    def learn() -> None:
        servers.others[0] = [servers.targets[1]]

    async def scenario() -> None:
        async with opened(servers.targets[0]) as client:
            assert await ids(client) == ["b", "c", "d", "e"]

    servers.after_page = learn
    run(scenario)
    assert servers.asked == [0, 0, 2, 0, 0, 1, 1]


def test_a_list_that_another_server_goes_on_with_begins_anew(
    servers: MovingServers, opened: Open
) -> None:
    """After its first page server 0 stands by for 1, which has other adapters."""
    two_lists(servers)

    def hand_over() -> None:
        servers.owner, servers.homes = 1, {}

    async def scenario() -> None:
        async with opened(servers.targets[0]) as client:
            assert await ids(client) == ["b", "d"]

    servers.after_page, servers.others = hand_over, {}
    run(scenario)
    assert servers.asked == [0, 0, 1, 1, 1]


def test_a_server_that_a_list_does_not_reach_is_named(
    servers: MovingServers, opened: Open
) -> None:
    two_lists(servers)
    begin = time.monotonic()

    async def scenario(gone: str) -> None:
        async with opened(servers.targets[0]) as client:
            with pytest.raises(weft.Unavailable, match=f"no adapters of {gone}: "):
                await ids(client)
            servers.others[0] = ["unix:/run/other"]
            with pytest.raises(weft.FailedPrecondition, match="names no owner's"):
                await ids(client)

    with closed_port() as gone:
        servers.others[0] = [servers.targets[1], gone]
        run(lambda: scenario(gone))
    assert time.monotonic() - begin < SECONDS
