"""Decides from which hosts and pages a request may come.

A web page can make its visitor's browser send requests to servers that only the visitor
reaches. If the page's own host name leads to such a server (DNS rebinding), the browser
also shows the page the answers. Such a request has the page's name as its Host.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.openai_front.errors import body_of

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Refusal(NamedTuple):
    """Why a request is not served, with the HTTP status."""

    status: int
    text: str


def is_host_name(text: str) -> bool:
    """Returns whether a text is the name of a host, without a port."""
    match = _HOST.fullmatch(text.lower())
    return match is not None and match[2] is None


def is_origin(text: str) -> bool:
    """Returns whether a text is an origin: SCHEME://HOST, or SCHEME://HOST:PORT."""
    scheme, _, host = text.partition("://")
    return scheme in _DEFAULT_PORTS and _HOST.fullmatch(host) is not None


def serves_host(host: str, allowed: Collection[str]) -> bool:
    """Returns whether a request with this Host is served: a name in `allowed`, or one
    that no page of another machine can have."""
    match = _HOST.fullmatch(host.lower())
    if match is None:
        return False
    name = match[1].removesuffix(".")
    if name in allowed or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def is_same_origin(origin: str, host: str) -> bool:
    """Returns whether a page of this origin has loaded from this host and port."""
    scheme, _, page = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    if port is None:
        return False
    return page.removesuffix(port) == host.lower().removesuffix(port)


def check(
    headers: Headers, allowed_hosts: Collection[str], allowed_origins: Collection[str]
) -> Refusal | None:
    """Returns why a request with these headers is not served; None if it is."""
    hosts = headers.getlist("host")
    if len(hosts) != 1:
        return Refusal(400, f"the request has {len(hosts)} Host headers, must have one")
    if not serves_host(hosts[0], allowed_hosts):
        return Refusal(
            421,
            f"Host is {hosts[0][:80]!r}, must be localhost, an IP address or a name of "
            "--allowed-hosts",
        )
    # A proxy that sets Host itself names the host that the browser asked for.
    asked = headers.get("x-forwarded-host", hosts[0]).partition(",")[0].strip()
    for origin in headers.getlist("origin"):
        if origin not in allowed_origins and not is_same_origin(origin, asked):
            return Refusal(
                403,
                f"Origin is {origin[:80]!r}, must be the page's own host or an origin "
                "of --allow-origin",
            )
    return None


class HostCheck:
    """Answers requests that `check` refuses, before their bodies are read."""

    def __init__(
        self,
        app: ASGIApp,
        allowed_hosts: Collection[str],
        allowed_origins: Collection[str],
    ) -> None:
        self._app = app
        self._hosts = allowed_hosts
        self._origins = allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            refusal = check(Headers(scope=scope), self._hosts, self._origins)
            if refusal is not None:
                body = body_of(refusal.text, "invalid_request_error")
                app = JSONResponse(body, refusal.status)
        await app(scope, receive, send)
