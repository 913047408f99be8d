"""A fake weftd that serves the console, with methods that send it requests."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from fake_weftd import FakeWeftd

import weft

DATA = [weft.Datum.next_token([1, 2, 3])]


class ConsoleServer(FakeWeftd):
    """A fake weftd that also listens for HTTP."""

    def __init__(self, *flags: str) -> None:
        super().__init__("--tinker-listen=127.0.0.1:0", *flags)
        self.url = f"http://{self.http}"

    def client(self, token: str | None = None) -> weft.Client:
        security = weft.Security(token=token)
        return weft.Client(self.target, retry=weft.NO_RETRY, security=security)

    def get(self, path: str, token: str | None = None) -> tuple[int, Any, bytes]:
        """Returns status, headers and body."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as reply:
                return reply.status, reply.headers, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read()

    def state(self, token: str | None = None, **query: str) -> Any:
        path = f"/console/v1/state?{urllib.parse.urlencode(query)}"
        status, _, body = self.get(path, token)
        assert status == 200, body
        return json.loads(body)
