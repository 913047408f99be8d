"""The HTTP server: time limits of requests and of the stop. Threads: one event loop."""

from __future__ import annotations

import asyncio
import logging
import socket

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.openai_front.intake import BODY_SECONDS

_log = logging.getLogger("weft.openai")
_log.setLevel(logging.INFO)

# A stop waits so long for answers. Kubernetes kills a process after 30 s.
GRACE_SECONDS = 20
HEAD_SECONDS = 10.0  # The time limit for a request's headers.
# The time limits by what a connection waits for. That of bodies is for bodies that
# nobody reads, because their request was refused. It ends after that of `Intake`.
_LIMITS = {h11.IDLE: HEAD_SECONDS, h11.SEND_BODY: BODY_SECONDS + 5.0}


class TimedProtocol(H11Protocol):
    """A connection that closes if a request does not arrive in time. uvicorn itself
    limits only the time between two requests."""

    _part: object = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self) -> None:
        """Starts the time limit of the next part, if the last part is complete."""
        part = self.conn.their_state
        if part is self._part:
            return
        self._part = part
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if part in _LIMITS:
            self._timer = self.loop.call_later(_LIMITS[part], self.transport.abort)


class Server(uvicorn.Server):
    """A server that says in its log where it listens, as soon as it does. target: the
    weftd that answers."""

    def __init__(self, config: uvicorn.Config, target: str) -> None:
        super().__init__(config)
        self._target = target

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        # A port 0 has become the one that the system has chosen.
        port = self.servers[0].sockets[0].getsockname()[1]
        host = self.config.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        _log.info(
            f"base URL {url}/v1, for weftd at {self._target}; "
            f"{url}/health and {url}/metrics say how it is"
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # uvicorn lets the signal end the process, so Python does not do it.
        for handler in logging.getLogger().handlers:
            handler.flush()


def config(app: ASGIApp, host: str, port: int) -> uvicorn.Config:
    """Returns the settings of a server at this address."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=TimedProtocol,
        timeout_graceful_shutdown=GRACE_SECONDS,
        log_config=None,
        log_level="warning",
    )
