"""A proxy that breaks connections: before it forwards a request, or in the middle of
the reply."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading


class FlakyProxy:
    """Forwards to `url`. `broken` counts the connections that the proxy broke."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.broken = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        for number in itertools.count():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._forward, args=(client, number), daemon=True
            ).start()

    def _forward(self, client: socket.socket, number: int) -> None:
        """Forwards pieces as they arrive, until request 3 + number % 4. If `number` is
        odd, breaks the connection before that request. Otherwise, breaks the connection
        in the middle of the reply to that request."""
        requests = 3 + number % 4
        replied = True
        with (
            contextlib.suppress(OSError),
            client,
            socket.create_connection(self._target) as server,
        ):
            while True:
                sender = select.select([client, server], [], [])[0][0]
                piece = sender.recv(65536)
                if not piece:
                    return
                if sender is client and replied:
                    requests -= 1
                replied = sender is server
                if requests == 0 and (replied or number % 2):
                    break
                (client if replied else server).sendall(piece)
            self.broken += 1
            if replied:
                client.sendall(piece[: len(piece) // 2])
