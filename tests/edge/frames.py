"""HTTP/2 frames, written byte by byte, for requests that no library would send."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW, MORE = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CHECK = "/grpc.health.v1.Health/Check"

Header = tuple[str, str]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    data = text.encode("latin-1")
    left = len(data)
    if left < 127:
        return bytes([left]) + data
    left -= 127
    length = bytearray([127])
    while left > 127:
        length.append(left % 128 + 128)
        left //= 128
    return bytes([*length, left]) + data


def block(path: str, token: str | None, more: Iterable[Header] = ()) -> bytes:
    """Returns the headers of a gRPC request, without compression."""
    pairs = [(":method", "POST"), (":scheme", "https"), (":path", path)]
    pairs += [(":authority", "localhost"), ("content-type", "application/grpc")]
    pairs += [("te", "trailers")]
    if token is not None:
        pairs.append(("authorization", f"Bearer {token}"))
    return b"".join(b"\0" + _text(k) + _text(v) for k, v in [*pairs, *more])


class Stranger:
    """A connection that speaks HTTP/2 without a library."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._data = b""
        self.send(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0))

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> bool:
        """Returns whether the other side still takes data."""
        with contextlib.suppress(OSError):
            self.sock.sendall(data)
            return True
        return False

    def request(
        self,
        stream: int,
        headers: bytes,
        piece: int = 16000,
        body: bytes | None = bytes(5),
    ) -> bool:
        """Sends headers in pieces (CONTINUATION), and a body that ends the stream."""
        pieces = [headers[i : i + piece] for i in range(0, len(headers), piece)]
        data = b""
        for number, part in enumerate(pieces):
            kind = HEADERS if number == 0 else MORE
            last = END_HEADERS if number == len(pieces) - 1 else 0
            data += frame(kind, last, stream, part)
        if body is not None:
            data += frame(DATA, END_STREAM, stream, body)
        return self.send(data)

    def reset_streams(self, headers: bytes, seconds: float) -> None:
        """Opens streams and resets each at once, until the other side has had
        enough."""
        stream, limit = 1, time.monotonic() + seconds
        while time.monotonic() < limit:
            pairs = b""
            for _ in range(50):
                pairs += frame(HEADERS, END_HEADERS, stream, headers)
                pairs += frame(RESET, 0, stream, bytes([0, 0, 0, 8]))
                stream += 2
            if not self.send(pairs):
                return

    def frames(self, seconds: float) -> list[tuple[int, int, bytes]]:
        """Returns the frames that come in time: kind, stream, payload. `GOAWAY, -1`
        stands for the end of the connection."""
        found = []
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            self.sock.settimeout(max(0.01, limit - time.monotonic()))
            try:
                piece = self.sock.recv(1 << 16)
            except TimeoutError:
                break
            except OSError:
                piece = b""
            if not piece:
                found.append((GOAWAY, -1, b""))
                break
            self._data += piece
            while len(self._data) >= 9:
                size = 9 + int.from_bytes(self._data[:3], "big")
                if len(self._data) < size:
                    break
                stream = int.from_bytes(self._data[5:9], "big") & 0x7FFFFFFF
                found.append((self._data[3], stream, self._data[9:size]))
                self._data = self._data[size:]
        return found


# Headers with which a stranger ended weftd, or the calls of others, through gRPC 1.51.
ATTACKS: dict[str, list[Header]] = {
    "an underscore and 9 kB": [("grpclb_client_stats", "x"), ("x-pad", "a" * 9000)],
    "an underscore alone": [("grpclb_client_stats", "x")],
    "an underscore and 5 kB": [("grpclb_client_stats", "x"), ("x-pad", "a" * 1900)] * 2,
    "9 kB": [("x-pad", "a" * 9000)],
    "31 kB": [("x-pad", "a" * 15500), ("x-pad2", "a" * 15500)],
    "many tiny headers": [("a", "b")] * 1500,
    "a -bin that is no base64": [("x-evil-bin", "!!!")],
    "a -bin of gRPC's own": [("grpc-trace-bin", "!!!"), ("lb-cost-bin", "%")],
    "strange values": [
        ("x", "\x80\xff"),
        ("grpc-timeout", "9" * 30 + "n"),
        ("te", "x"),
    ],
}
