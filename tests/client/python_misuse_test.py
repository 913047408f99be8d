"""Tests wrong uses of the client: closed clients, forks, several event loops, callbacks
that wait, and values that no message can hold."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from conftest import FAST, Sent, wait_until
from fake_weftd import FakeWeftd
from small_server import SmallServer

import weft

DATA = [weft.Datum.next_token([1, 2, 3])]
CLOSED = "the client is closed"


@pytest.mark.parametrize(
    "call",
    [
        lambda client, adapter: adapter.forward_backward(DATA),
        lambda client, adapter: adapter.submit.optim_step(),
        lambda client, adapter: client.info(),
        lambda client, adapter: client.sample_many([[1]] * 3),
        lambda client, adapter: list(client.sample_stream([1])),
        lambda client, adapter: adapter.export("out"),
    ],
)
def test_a_closed_client_says_so_and_gives_out_no_number(
    call: Callable[[weft.Client, weft.Adapter], object], server: FakeWeftd
) -> None:
    client = weft.Client(server.target, retry=FAST)
    adapter = client.create_adapter("a")
    client.close()
    for _ in range(2):
        with pytest.raises(weft.FailedPrecondition, match=CLOSED):
            call(client, adapter)
    assert adapter.next_step == 1 and not client.healthy()


def steps_arrived(server: FakeWeftd) -> int:
    return [rpc for rpc, _ in server.arrived()].count("OptimStep")


def test_the_end_of_a_client_ends_what_is_in_flight_and_what_pauses(
    server: FakeWeftd,
) -> None:
    client = weft.Client(server.target, retry=FAST)
    adapter, other = client.create_adapter("a"), client.create_adapter("b")
    server.hold()
    held = adapter.submit.optim_step()
    wait_until(lambda: steps_arrived(server) == 1)
    server.retry_hint(20_000)
    server.refuse("OptimStep", grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    refused = other.submit.optim_step()
    wait_until(lambda: bool(client._driver.pausing))
    client.close()
    with pytest.raises(weft.Cancelled):
        held.result(5)
    with pytest.raises(weft.FailedPrecondition, match=CLOSED):
        refused.result(5)


def test_the_end_of_an_asyncio_client_is_a_weft_error(server: FakeWeftd) -> None:
    async def body() -> None:
        client = weft.AsyncClient(server.target, retry=FAST)
        adapter = await client.create_adapter("a")
        other = await client.create_adapter("b")
        server.hold()
        held = adapter.submit.optim_step()
        while steps_arrived(server) < 1:
            await asyncio.sleep(0.01)
        server.retry_hint(20_000)
        server.refuse("OptimStep", grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        refused = other.submit.optim_step()
        while steps_arrived(server) < 2:
            await asyncio.sleep(0.01)
        # The refusal arrives within this time. The client then waits 20 s to retry.
        await asyncio.sleep(0.5)
        await client.close()
        with pytest.raises(weft.Cancelled):
            await held
        with pytest.raises(weft.FailedPrecondition, match=CLOSED):
            await asyncio.wait_for(refused, 5)
        with pytest.raises(weft.FailedPrecondition, match=CLOSED):
            await client.info()
        with pytest.raises(weft.FailedPrecondition):
            adapter.submit.optim_step()

    asyncio.run(body())


def test_a_callback_that_waits_is_told_so_and_one_that_submits_works(
    client: weft.Client, server: FakeWeftd
) -> None:
    adapter = client.create_adapter("a")
    found: Future[weft.OptimResult] = Future()
    waited: Future[str] = Future()

    def on_done(_: object) -> None:
        try:
            client.info()
        except weft.FailedPrecondition as error:
            waited.set_result(error.message)
        adapter.submit.optim_step().add_done_callback(
            lambda step: found.set_result(step.result())
        )

    server.hold()
    first = adapter.submit.forward_backward(DATA)
    first.add_done_callback(on_done)
    server.release()
    assert "submit the call" in waited.result(5)
    assert found.result(5).step == 2
    assert client.info()  # Outside of callbacks, a call may wait.


def test_no_error_of_many_samples_goes_unseen(server: FakeWeftd) -> None:
    unseen: list[Any] = []

    def note(_: object, context: dict[str, Any]) -> None:
        # The gRPC poller of an earlier loop in this process may report to this loop
        # that the earlier loop is closed. Such a report is not counted.
        if "task" in context or "future" in context:
            unseen.append(context)

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(note)
        async with weft.AsyncClient(server.target, retry=FAST) as client:
            server.hold()
            for _ in range(4):
                server.refuse("Sample", grpc.StatusCode.INTERNAL, "broken")
            many = asyncio.ensure_future(client.sample_many([[1]] * 6))
            # Blocks the loop while the answers come. The loop then sees all at once.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            time.sleep(0.3)
            with pytest.raises(weft.Internal, match="broken"):
                await many
            del many
            # No call is left in flight.
            assert asyncio.all_tasks() == {asyncio.current_task()}
            gc.collect()

    asyncio.run(body())
    gc.collect()
    assert not unseen
    server.release()


def in_a_fork(body: Callable[[], object]) -> str:
    """Returns what body() raises in a child of this process."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            body()
            os.write(writes, b"nothing")
        except weft.WeftError as error:
            os.write(writes, str(error).encode())
        finally:
            os._exit(0)
    os.close(writes)
    try:
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
    except AssertionError:
        os.kill(child, 9)
        raise
    with os.fdopen(reads) as said:
        return said.read()


def test_a_client_from_before_a_fork_says_so_and_its_parent_goes_on() -> None:
    with SmallServer() as server, weft.Client(server.target, timeout=20) as client:
        client.info()
        parts = client.sample_stream([1], max_tokens=2)
        next(parts)  # A call that is in flight at the fork.
        assert "made before fork()" in in_a_fork(client.info)
        assert "made before fork()" in in_a_fork(lambda: client.sample_stream([1]))
        # To end the connection would wait for threads that the child does not have.
        assert in_a_fork(client.close) == "nothing"
        server.finish.set()
        assert len(list(parts)) == 1
        assert client.info().model.name == "toy"


def test_what_has_a_connection_is_not_pickled(server: FakeWeftd) -> None:
    with weft.Client(server.target, retry=FAST) as client:
        adapter = client.create_adapter("a")
        slow = weft.AsyncClient(server.target)
        for thing in (client, adapter, slow):
            for use in (pickle.dumps, copy.deepcopy):
                with pytest.raises(TypeError, match="make a client there") as caught:
                    use(thing)
                assert f"weft: {thing!r} has a connection" in str(caught.value)


def test_an_asyncio_client_may_be_made_outside_of_its_loop() -> None:
    with SmallServer() as server:
        client = weft.AsyncClient(server.target, timeout=20)

        async def use() -> None:
            assert (await client.info()).model.name == "toy"
            assert [1 async for _ in client.sample_stream([1], max_tokens=2)] == [1, 1]

        server.finish.set()
        asyncio.run(use())
        for call in (use, client.close):
            with pytest.raises(weft.FailedPrecondition, match="in another event loop"):
                asyncio.run(call())

        unused = weft.AsyncClient(server.target)
        asyncio.run(unused.close())


@pytest.mark.parametrize("timeout", [None, 1e12, float("inf")])
def test_a_call_may_have_no_time_limit(timeout: float | None) -> None:
    async def use(target: str) -> None:
        async with weft.AsyncClient(target, timeout=timeout) as client:
            await client.info()
            await client.sample_many([[1]] * 3)
            assert [1 async for _ in client.sample_stream([1], max_tokens=2)] == [1, 1]

    with SmallServer() as server:
        server.finish.set()
        with weft.Client(server.target, timeout=timeout) as client:
            assert client.healthy() and client.info().model.name == "toy"
            assert len(client.sample_many([[1]] * 3)) == 3
            assert len(list(client.sample_stream([1], max_tokens=2))) == 2
        asyncio.run(use(server.target))


def stops(sent: Sent) -> Any:
    return sent[-1].config.stop


def test_one_text_or_byte_string_is_one_stop(sent: Sent, server: FakeWeftd) -> None:
    with weft.Client(server.target, retry=FAST) as client:
        client.sample([1], max_tokens=1, stop="\n\n")
        assert stops(sent).byte_strings == [b"\n\n"]
        client.sample([1], max_tokens=1, stop=b"ab")
        assert stops(sent).byte_strings == [b"ab"] and not stops(sent).token_ids
        client.sample([1], max_tokens=1, stop=["ab", 5])
        assert stops(sent).byte_strings == [b"ab"] and stops(sent).token_ids == [5]
