"""Takes in requests: checks the caller's key, then reads the body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.errors import WeftError
from weft.openai_front.errors import on_http_error, on_weft_error

BODY_SECONDS = 30.0  # The time limit for a body.


class Intake:
    """Reads the body of a request before the application does, and only after `admit`
    has accepted the caller's key.

    Answers 413 to a body of more than max_bytes, and 408 to a body that has not
    arrived after BODY_SECONDS. admit: raises WeftError for a key that the server does
    not know.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        admit: Callable[[Request], Awaitable[object]],
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._admit = admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            await self._admit(request)
            messages = await self._read(receive)
        except WeftError as error:
            await (await on_weft_error(request, error))(scope, receive, send)
            return
        except HTTPException as error:
            await (await on_http_error(request, error))(scope, receive, send)
            return

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, again, send)

    async def _read(self, receive: Receive) -> list[Message]:
        messages: list[Message] = []
        count = 0
        more = True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    messages.append(message)
                    count += len(message.get("body", b""))
                    if count > self._max_bytes:
                        text = f"the body has more than {self._max_bytes} bytes"
                        raise HTTPException(413, text)
                    is_part = message["type"] == "http.request"
                    more = is_part and message.get("more_body", False)
        except TimeoutError:
            text = f"the body has not arrived after {BODY_SECONDS:g} s"
            raise HTTPException(408, text, {"Connection": "close"}) from None
        return messages
