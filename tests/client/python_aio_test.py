"""Tests what the asyncio client's driver does by itself. python_client_test.py
tests the decisions that both clients share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from conftest import FAST, Sent
from fake_weftd import FakeWeftd

import weft

DATA = [weft.Datum.next_token([1, 2, 3])]
Body = Callable[[weft.AsyncClient], Awaitable[None]]


def run(server: FakeWeftd, body: Body) -> None:
    async def main() -> None:
        made = weft.AsyncClient(server.target, timeout=20.0, retry=FAST)
        async with made as client:
            await body(client)

    asyncio.run(main())


def test_trains_samples_and_saves(server: FakeWeftd) -> None:
    async def body(client: weft.AsyncClient) -> None:
        adapter = await client.create_adapter("a", rank=2, tenant="alice")
        assert (await adapter.info()).tenant == "alice"
        assert (await adapter.forward_backward(DATA)).step == 1
        assert (await adapter.forward(DATA)).step == 2
        assert (await adapter.optim_step()).step == 3
        sample = await adapter.sample([1], max_tokens=2)
        assert sample.samples[0].tokens == [2, 3]
        assert (await adapter.save("one")).last_step == 4
        assert [c.name for c in await client.checkpoints()] == ["one"]
        loaded = await adapter.load("one", durability="step")
        assert (loaded.last_step, loaded.durability) == (4, "memory")
        assert await adapter.snapshot("s") == (await adapter.info()).version
        await adapter.release_snapshot("s")
        assert (await client.info()).device == "cpu"
        assert len(await client.adapters()) == 1
        await adapter.delete()
        assert await client.healthy()
        await client.drain()

    run(server, body)


def test_retries_and_sees_replays(server: FakeWeftd) -> None:
    async def body(client: weft.AsyncClient) -> None:
        adapter = await client.create_adapter("a")
        for _ in range(2):
            server.lose_reply("OptimStep")
        result = await adapter.optim_step()
        assert result.replayed and result.step == 1

    run(server, body)
    assert len(server.applied()) == 1


def test_cancelled_task_asks_for_the_number(server: FakeWeftd) -> None:
    async def body(client: weft.AsyncClient) -> None:
        adapter = await client.create_adapter("a")
        server.hold()
        task = adapter.submit.optim_step()
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(weft.FailedPrecondition):
            adapter.submit.optim_step()
        server.release()
        assert (await adapter.optim_step()).step in (1, 2)

    run(server, body)


def test_streams(server: FakeWeftd) -> None:
    async def body(client: weft.AsyncClient) -> None:
        stream = client.sample_stream([1], max_tokens=3)
        tokens = [token async for delta in stream for token in delta.tokens]
        assert tokens == [2, 3, 4]
        server.refuse("SampleStream", grpc.StatusCode.NOT_FOUND, "gone")
        with pytest.raises(weft.NotFound):
            async for _ in client.sample_stream([1]):
                pass

    run(server, body)


def test_moves_folders(server: FakeWeftd, tmp_path: Path) -> None:
    async def body(client: weft.AsyncClient) -> None:
        source = tmp_path / "in"
        source.mkdir()
        (source / "adapter_config.json").write_text("{}")
        (source / "adapter_model.safetensors").write_bytes(b"x" * 5000)
        adapter = await client.import_adapter("a", source, tenant="alice")
        assert (await adapter.info()).tenant == "alice"
        await adapter.export(tmp_path / "out")
        made = tmp_path / "out" / "adapter_model.safetensors"
        assert made.read_bytes() == b"x" * 5000

    run(server, body)


def test_custom_loss(server: FakeWeftd, sent: Sent) -> None:
    async def body(client: weft.AsyncClient) -> None:
        adapter = await client.create_adapter("a")
        result = await adapter.forward_backward_custom(
            DATA, lambda lps: (3.0, [lp * 0 + 1 for lp in lps])
        )
        assert result.metrics["loss:sum"] == 3.0
        assert result.step == 2

    run(server, body)
    weights = sent[-1].data[0].weights_le
    assert weights == b"\x00\x00\x80\xbf" * 2
