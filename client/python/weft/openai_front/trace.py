"""Names each request, so that its lines in the server's log can be found."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.routing import Metadata, trace_metadata

REQUEST_ID = "x-request-id"
# The server takes these forms, and logs the trace id of a traceparent if it has both.
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def trace_ids(headers: Headers) -> Metadata:
    """Returns the metadata that passes on a request's ids. A request without an id of
    its own has that of its trace, or gets one."""
    parent = _PARENT.fullmatch(headers.get("traceparent", ""))
    name = headers.get(REQUEST_ID, "")
    if not _ID.fullmatch(name):
        name = parent[1] if parent else uuid.uuid4().hex
    own = (REQUEST_ID, name)
    return (own, ("traceparent", parent[0])) if parent else (own,)


class RequestIds:
    """Puts the id of a request into its answer and into its calls to the server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ids = trace_ids(Headers(scope=scope))
        trace_metadata.set(ids)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = dict(ids)[REQUEST_ID]
            await send(message)

        await self._app(scope, receive, named)
