"""A proxy in front of a server whose results take longer than one poll."""

from __future__ import annotations

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KIND = "application/json"


class SlowProxy:
    """Forwards to `url`, but answers the first poll for each result as weftd does when
    there is no result within its long poll. `polled` has the ids of these results."""

    def __init__(self, url: str) -> None:
        self._target = url.removeprefix("http://")
        self.polled: set[str] = set()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                proxy._answer(self)

            do_POST = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, asked: BaseHTTPRequestHandler) -> None:
        body = asked.rfile.read(int(asked.headers.get("Content-Length", 0)))
        if asked.path.endswith("/retrieve_future"):
            future = json.loads(body)["request_id"]
            if future not in self.polled:
                self.polled.add(future)
                answer = {"type": "try_again", "queue_state": "active"}
                self._send(asked, 408, KIND, json.dumps(answer).encode())
                return
        connection = http.client.HTTPConnection(self._target, timeout=60)
        headers = {k: v for k, v in asked.headers.items() if k.lower() != "host"}
        connection.request(asked.command, asked.path, body, headers)
        reply = connection.getresponse()
        kind = reply.getheader("Content-Type", KIND)
        self._send(asked, reply.status, kind, reply.read())
        connection.close()

    @staticmethod
    def _send(
        asked: BaseHTTPRequestHandler, status: int, kind: str, body: bytes
    ) -> None:
        asked.send_response(status)
        asked.send_header("Content-Type", kind)
        asked.send_header("Content-Length", str(len(body)))
        asked.end_headers()
        asked.wfile.write(body)
