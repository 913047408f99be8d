"""Decides to which of several servers a client's calls go.

Each adapter has one server, its owner, that runs the calls for it. Other servers answer
MOVED with the owner's address, and have not run the call. So any call is safe to send
there, and later calls for the adapter go there, too, until the owner cannot be reached.
So do all other calls if the server that answered stands by. If it does not, its answer
names the adapter.
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
# The most adapters with an address of their own. Then the oldest is forgotten, and the
# next call for it asks for the way again.
MAX_ADAPTERS = 10_000
# What gRPC says of a call that has not left, because there is no connection.
_UNSENT = ("failed to connect to all addresses", "DNS resolution failed")
_OWNER = re.compile(r"[^,/]+:\d+")


class Route:
    """The addresses of a client's servers, the one that calls go to now, and those of
    adapters that are elsewhere.

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
        self._adapters: dict[str, str] = {}  # The oldest first.

    def __len__(self) -> int:
        return len(self._addresses)

    def target(self, adapter_id: str = "") -> str:
        """Returns the address for the calls for an adapter; "": for all others."""
        with self._lock:
            return self._target(adapter_id)

    def _target(self, adapter_id: str = "") -> str:
        known = self._adapters.get(adapter_id) or self._owner
        return known or self._addresses[self._place]

    def _check(self, asked: str, named: str) -> None:
        if not _OWNER.fullmatch(named):
            raise FailedPrecondition(f"{asked} names no owner's address: {named!r}")
        try:
            self.security.check(named)
        except WeftError as error:
            message = f"{asked} names the owner {named!r}: {error.message}"
            raise FailedPrecondition(message) from None

    def other(self, asked: str, named: str) -> Route:
        """Returns a route of its own to another server, which the one at `asked` names.
        Raises as `follow`."""
        self._check(asked, named)
        return Route(named, self.security)

    def follow(
        self, asked: str, owner: str, adapter_id: str = "", alone: bool = False
    ) -> None:
        """Notes that the server at `asked` names the owner of an adapter; "": the call
        was for none. Raises FailedPrecondition if the owner's address is none, or if a
        token would go there in plaintext.

        alone: the calls for other adapters, or for none, do not belong there.
        """
        self._check(asked, owner)
        with self._lock:
            # Another call may have learnt more since this one was sent.
            follows = not alone and self._target() == asked
            if adapter_id and self._target(adapter_id) == asked:
                self._adapters.pop(adapter_id, None)
                self._adapters[adapter_id] = owner
                if len(self._adapters) > MAX_ADAPTERS:
                    del self._adapters[next(iter(self._adapters))]
            if follows:
                self._owner = owner

    def leave(self, asked: str) -> None:
        """Notes that the server at `asked` cannot be reached, or knows no owner."""
        with self._lock:
            if asked in self._adapters.values():
                kept = {key: at for key, at in self._adapters.items() if at != asked}
                self._adapters = kept
            # Also after an owner: whoever named it may name it for ever, as one does
            # that knows it by an address which leads nowhere from here.
            if self._target() == asked:
                self._owner = None
                self._place = (self._place + 1) % len(self._addresses)

    def restart(self, adapter_id: str) -> None:
        """Forgets the owners of an adapter and of all other calls, and begins with the
        first address."""
        with self._lock:
            self._adapters.pop(adapter_id, None)
            self._owner, self._place = None, 0


class Trip:
    """The servers that one call asks. adapter_id: the adapter it is for; "": none. Not
    thread-safe."""

    def __init__(self, route: Route, adapter_id: str) -> None:
        self._route = route
        self._adapter_id = adapter_id
        self._asked = ""
        self._hops = 0
        self._unsent = 0

    def next(self) -> str:
        """Returns the address for the next attempt."""
        self._asked = self._route.target(self._adapter_id)
        return self._asked

    def goes_on(self, error: WeftError) -> bool:
        """Notes that the latest attempt failed. Returns whether the call goes on with
        another at once, because it has not run. If not, an attempt after a pause may
        find another server. Raises what Route.follow raises."""
        asked, values = self._asked, error.values
        if error.reason == MOVED:
            if self._hops < MAX_HOPS:
                self._hops += 1
                owner, alone = values.get("address", ""), "adapter" in values
                self._route.follow(asked, owner, self._adapter_id, alone)
                return True
            self._route.restart(self._adapter_id)
        elif error.code == "UNAVAILABLE":
            if not error.from_server or error.reason == STANDBY:
                self._route.leave(asked)
            # Once for each address, and for an owner.
            unsent = not error.from_server and error.message.startswith(_UNSENT)
            if unsent and self._unsent < len(self._route):
                self._unsent += 1
                return self._route.target(self._adapter_id) != asked
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
