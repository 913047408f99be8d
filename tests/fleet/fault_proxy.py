"""A proxy in front of an object store, which breaks some requests.

A request is lost before the store has it, or before its body has come. Or its answer is
lost, late or cut, or the store seems to refuse it (503), or it comes twice. What is
late has happened before: the store never gets a request after its sender has given up.
After `forget` requests, conditions are dropped, as if the store ignored them. With
`serial`, the store gets one request at a time. Requests that `held` matches wait until
it is None.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections import Counter
from types import TracebackType
from urllib.parse import urlsplit

FAULTS = ("lose_request", "lose_body", "lose_answer", "late", "cut", "refuse", "double")
REFUSAL = b"<Error><Code>SlowDown</Code><Message>reduce the rate</Message></Error>"
_CONDITION = re.compile(rb"^(?:if-none-match|if-match):[^\r\n]*\r\n", re.I | re.M)
_LENGTH = re.compile(rb"^content-length: *(\d+)", re.I | re.M)
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _read(reader: asyncio.StreamReader, bodyless: bool) -> bytes:
    """Returns the store's next answer, with its head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b"chunked" in head.lower():
        body = b""
        while not body.endswith(b"\r\n0\r\n\r\n") and body != b"0\r\n\r\n":
            body += await reader.readuntil(b"\r\n")
        return head + body
    length = _LENGTH.search(head)
    if bodyless or length is None:
        return head
    return head + await reader.readexactly(int(length[1]))


class FaultProxy:
    """`url` is where it listens. `faults` counts what it did."""

    def __init__(
        self,
        to: str,
        seed: int = 0,
        rate: float = 0.0,
        late_seconds: float = 3.0,
        forget: int | None = None,
        serial: bool = False,
    ) -> None:
        self._to = urlsplit(to)
        self._random = random.Random(seed)
        self._rate = rate
        self._late_seconds = late_seconds
        self._forget = forget
        self._count = 0
        self._turn = asyncio.Semaphore(1 if serial else 1000)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.faults: Counter[str] = Counter()
        self.held: re.Pattern[bytes] | None = None
        self.url = ""

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.url = "http://{}:{}".format(*self._server.sockets[0].getsockname()[:2])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        store: _Streams | None = None
        try:
            while True:
                request = await self._read_request(reader, writer)
                if store is None:
                    store = await asyncio.open_connection(
                        self._to.hostname, self._to.port, limit=1 << 20
                    )
                answer = await self._answer(request, store)
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
                if b"\r\nconnection: close" in answer[:4096].lower():
                    return
        except (OSError, EOFError):
            return
        finally:
            writer.close()
            if store is not None:
                store[1].close()

    async def _read_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"100-continue" in head:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = re.sub(rb"(?im)^expect:[^\r\n]*\r\n", b"", head)
        length = _LENGTH.search(head)
        body = await reader.readexactly(int(length[1])) if length else b""
        self._count += 1
        if self._forget is not None and self._count > self._forget:
            head = _CONDITION.sub(b"", head)
        return head + body

    async def _forward(self, request: bytes, store: _Streams) -> bytes:
        reader, writer = store
        async with self._turn:
            writer.write(request)
            await writer.drain()
            return await _read(reader, request.startswith(b"HEAD "))

    async def _send_head(self, request: bytes) -> None:
        """Sends a request without its body, as a process does that is killed."""
        _, writer = await asyncio.open_connection(self._to.hostname, self._to.port)
        writer.write(request[: request.index(b"\r\n\r\n") + 4])
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def _answer(self, request: bytes, store: _Streams) -> bytes | None:
        """Returns the answer; None: the connection ends without one."""
        while self.held is not None and self.held.match(request):
            await asyncio.sleep(0.01)
        fault = ""
        if self._random.random() < self._rate:
            fault = self._random.choice(FAULTS)
            self.faults[fault] += 1
        if fault == "lose_request":
            return None
        if fault == "lose_body":
            await self._send_head(request)
            return None
        if fault == "refuse":
            head = f"HTTP/1.1 503 X\r\ncontent-length: {len(REFUSAL)}\r\n\r\n"
            return head.encode() + REFUSAL
        answer = await self._forward(request, store)
        if fault == "double":
            answer = await self._forward(request, store)
        if fault == "late":
            await asyncio.sleep(self._late_seconds)
        if fault == "lose_answer":
            return None
        if fault == "cut":
            end = b"\r\nconnection: close\r\n"
            return answer[: len(answer) // 2].replace(b"\r\n", end, 1)
        return answer
