"""Forwards connections to the daemon that serves, as a load balancer does."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType


class Door:
    """`url` is where it listens. Threads: any."""

    def __init__(self) -> None:
        self.url = ""
        self._target = ""
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Door:
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.url = "http://{}:{}".format(*server.sockets[0].getsockname()[:2])
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

    def point(self, target: str) -> None:
        """Sends later connections to HOST:PORT, or refuses them if it is empty. Ends
        those to another daemon: a frozen one would keep them for ever."""
        if target != self._target:
            self._target = target
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        for writer in self._writers:
            writer.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        ends = [writer]
        try:
            host, _, port = self._target.partition(":")
            if not port:
                return
            to_reader, to_writer = await asyncio.open_connection(host, int(port))
            ends.append(to_writer)
            self._writers.update(ends)
            await asyncio.wait(
                [
                    asyncio.ensure_future(_copy(reader, to_writer)),
                    asyncio.ensure_future(_copy(to_reader, writer)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        except OSError:
            return
        finally:
            self._writers.difference_update(ends)
            for end in ends:
                end.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        return
