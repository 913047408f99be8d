"""Counts the front's requests, for Prometheus."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.openai_front.log import Log

PATH = "/metrics"
# The upper ends of the buckets, in seconds.
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
# Other paths count as one, so that a stranger cannot make metrics without end.
COMMENT = b":"  # Begins a line of a stream that only keeps the connection open.
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health")


class Metrics:
    """Serves /metrics, and counts all other requests by path and status. A request
    takes until its answer begins, which is the first token of a stream."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open = 0
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] == PATH and scope["method"] == "GET":
            await PlainTextResponse(self._page())(scope, receive, send)
            return
        start = time.monotonic()
        status = 0  # Of an answer whose first bytes have not come.

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status and not message.get("body", b"").startswith(COMMENT):
                self._count(scope["path"], status, time.monotonic() - start)
                status = 0
            await send(message)

        self._open += 1
        try:
            await self._app(scope, receive, counted)
        finally:
            self._open -= 1
            if status:
                self._count(scope["path"], status, time.monotonic() - start)

    def _count(self, path: str, status: int, seconds: float) -> None:
        path = path.removeprefix("/oai/api")
        self._requests[path if path in _PATHS else "other", status] += 1
        self._buckets[bisect_left(BUCKETS, seconds)] += 1
        self._seconds += seconds

    def _page(self) -> str:
        lines = [
            "# HELP weft_openai_requests_total Requests answered, by path and status.",
            "# TYPE weft_openai_requests_total counter",
        ]
        for (path, status), count in sorted(self._requests.items()):
            labels = f'path="{path}",status="{status}"'
            lines.append(f"weft_openai_requests_total{{{labels}}} {count}")
        name = "weft_openai_answer_seconds"
        lines += [
            f"# HELP {name} Seconds from a request to the beginning of its answer.",
            f"# TYPE {name} histogram",
        ]
        total = 0
        for end, count in zip((*BUCKETS, "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{end}"}} {total}')
        lines += [
            f"{name}_sum {self._seconds}",
            f"{name}_count {total}",
            "# HELP weft_openai_requests_open Requests whose answers have not ended.",
            "# TYPE weft_openai_requests_open gauge",
            f"weft_openai_requests_open {self._open}",
            "# HELP weft_openai_log_lines_dropped_total Lines that the log left out.",
            "# TYPE weft_openai_log_lines_dropped_total counter",
            f"weft_openai_log_lines_dropped_total {Log.num_dropped}",
        ]
        return "\n".join(lines) + "\n"
