"""Decides to which of several servers a client's calls go.

Of servers with the same state only one, its owner, runs calls. The others answer MOVED
with the owner's address, and have not run the call. So any call is safe to send there,
and all calls of the client go there from then on, until the owner cannot be reached.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any, Generic

from weft.channel import SCHEMES, ChannelT, Security
from weft.errors import FailedPrecondition, WeftError
from weft.methods import Bound, Method

# Reasons of errors (weft/v1/errors.proto).
MOVED = "MOVED"
STANDBY = "STANDBY"
# More answers in a row contradict each other: their servers have yet to learn who is
# the owner now.
MAX_HOPS = 3
# What gRPC says of a call that has not left, because there is no connection.
_UNSENT = ("failed to connect to all addresses", "DNS resolution failed")
_OWNER = re.compile(r"[^,/]+:\d+")


class Route:
    """The addresses of a client's servers, and the one that calls go to now.

    target: HOST:PORT, or several with commas. Raises what Security.check raises for one
    of them. Threads: any.
    """

    def __init__(self, target: str, security: Security) -> None:
        self.text = target
        self.security = security
        self._addresses = [target]
        if isinstance(target, str) and not target.startswith(SCHEMES):
            self._addresses = [one.strip() for one in target.split(",")]
        for address in self._addresses:
            security.check(address)
        self._lock = threading.Lock()
        self._place = 0  # The address that is in use while no owner is known.
        self._owner: str | None = None

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def target(self) -> str:
        with self._lock:
            return self._target()

    def _target(self) -> str:
        return self._owner or self._addresses[self._place]

    def follow(self, asked: str, owner: str) -> None:
        """Notes that the server at `asked` names the owner. Raises FailedPrecondition
        if the owner's address is none, or if a token would go there in plaintext."""
        if not _OWNER.fullmatch(owner):
            raise FailedPrecondition(f"{asked} names no owner's address: {owner!r}")
        try:
            self.security.check(owner)
        except WeftError as error:
            message = f"{asked} names the owner {owner!r}: {error.message}"
            raise FailedPrecondition(message) from None
        with self._lock:
            # Another call may have learnt more since this one was sent.
            if self._target() == asked:
                self._owner = owner

    def leave(self, asked: str) -> None:
        """Notes that the server at `asked` cannot be reached, or knows no owner."""
        with self._lock:
            if self._owner == asked:
                self._owner = None
            elif self._target() == asked:
                self._place = (self._place + 1) % len(self._addresses)

    def restart(self) -> None:
        """Forgets the owner, and begins with the first address."""
        with self._lock:
            self._owner, self._place = None, 0


class Trip:
    """The servers that one call has asked. Not thread-safe."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._hops = 0
        self._unsent = 0

    def goes_on(self, asked: str, error: WeftError) -> bool:
        """Notes that the call failed at an address. Returns whether it goes on to
        route.target at once, because it has not run. If not, a repetition after a pause
        goes there. Raises what Route.follow raises."""
        if error.reason == MOVED:
            if self._hops < MAX_HOPS:
                self._hops += 1
                self._route.follow(asked, error.values.get("address", ""))
                return True
            self._route.restart()
        elif error.code == "UNAVAILABLE":
            if not error.from_server or error.reason == STANDBY:
                self._route.leave(asked)
            # Once for each address, and for an owner.
            unsent = not error.from_server and error.message.startswith(_UNSENT)
            if unsent and self._unsent < len(self._route):
                self._unsent += 1
                return self._route.target != asked
        self._hops = self._unsent = 0
        return False


class Links(Generic[ChannelT]):
    """A client's channels, one for each address that it has called. Threads: any."""

    def __init__(self, open_channel: Callable[[str], ChannelT]) -> None:
        self._open = open_channel
        self._lock = threading.Lock()
        self._channels: dict[str, ChannelT] = {}
        self._bound: dict[tuple[str, str], Bound] = {}
        self._closed = False

    def channel(self, target: str) -> ChannelT:
        """Returns the channel to an address. Raises FailedPrecondition once closed."""
        with self._lock:
            if self._closed:
                raise FailedPrecondition("the client is closed")
            if target not in self._channels:
                self._channels[target] = self._open(target)
            return self._channels[target]

    def bound(self, target: str, method: Method[Any, Any]) -> Bound:
        """Returns a function that performs an RPC at an address."""
        key = (target, method.path)
        if key not in self._bound:
            self._bound[key] = method.bind(self.channel(target))
        return self._bound[key]

    def close(self) -> list[ChannelT]:
        """Opens no more channels, and returns those to close."""
        with self._lock:
            self._closed = True
            return [*self._channels.values()]
