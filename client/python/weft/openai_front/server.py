"""The HTTP server: time limits of requests and of the stop. Threads: one event loop."""

from __future__ import annotations

import asyncio

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.openai_front.intake import BODY_SECONDS

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


def config(app: ASGIApp, host: str, port: int) -> uvicorn.Config:
    """Returns the settings of a server at this address."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=TimedProtocol,
        timeout_graceful_shutdown=GRACE_SECONDS,
        log_level="warning",
    )
