"""A limit on the size of requests."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.openai_front.errors import body_of


class BodyLimit:
    """Answers 413 to a request whose body has more than max_bytes. It reads the body
    before the application does."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        count = 0
        more = True
        while more:
            message = await receive()
            messages.append(message)
            count += len(message.get("body", b""))
            more = message["type"] == "http.request" and message.get("more_body", False)
            if count > self._max_bytes:
                text = f"the body has more than {self._max_bytes} bytes"
                refusal = JSONResponse(body_of(text, "invalid_request_error"), 413)
                await refusal(scope, receive, send)
                return

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, again, send)
