"""A client's contact with its server: what it waits for, and whether there is any."""

from __future__ import annotations

import logging
import math
import time

from weft.errors import ResourceExhausted, Unavailable, WeftError

# A client that has never had an answer tries so long to connect, in seconds.
FIRST_SECONDS = 2.8
_SAY_SECONDS = 10.0  # The interval of lines about calls that wait.
_log = logging.getLogger("weft")


class Contact:
    """Logs a line when a call waits to be repeated, at most every 10 seconds. Threads:
    any."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._is_made = False
        self._said_at = -math.inf

    def made(self) -> None:
        """Notes that the server has answered."""
        self._is_made = True

    def note(self, error: WeftError) -> None:
        """Notes an answer that is an error."""
        if error.from_server or error.retry_after is not None or error.reason:
            self._is_made = True

    def check(
        self, error: WeftError, began: float, sent: float, delay: float | None
    ) -> None:
        """Raises Unavailable if there never was a connection, and none is likely within
        FIRST_SECONDS.

        began, sent: when the call and the attempts since its last pause began, by
        time.monotonic().
        delay: the seconds until the next attempt; None: there is none.
        """
        self.note(error)
        if self._is_made or not isinstance(error, Unavailable) or not error.repeatable:
            return
        now = time.monotonic()
        # Further attempts would take as long as the last ones.
        if delay is not None and now - began + delay + now - sent < FIRST_SECONDS:
            return
        tls = ""
        # What gRPC's and nginx's TLS ports answer to plaintext.
        if "Socket closed" in error.message or "http1.x" in error.message:
            tls = " If it speaks TLS, so must the client (WEFT_TLS=1, WEFT_CA)."
        raise Unavailable(
            f"no connection to {self.target}: is weftd running there?{tls} "
            f"({error.message})"
        ) from None

    def say(self, name: str, error: WeftError, began: float, left: float) -> None:
        """Says what a call waits for, since when and until when.

        began: by time.monotonic(). left: for how long the call will be repeated. A full
        server is worth a line only if the call has waited long.
        """
        now = time.monotonic()
        is_usual = isinstance(error, ResourceExhausted) and now - began < _SAY_SECONDS
        if is_usual or now - self._said_at < _SAY_SECONDS:
            return
        self._said_at = now
        if not self._is_made:
            left = min(left, began + FIRST_SECONDS - now)
        until = "without limit" if math.isinf(left) else f"for {left:.0f} s at most"
        _log.warning(
            "%s waits for the server %s since %.0f s (%s), and goes on %s",
            name,
            self.target,
            now - began,
            error,
            until,
        )
