"""Channel settings common to both clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc

ChannelT = TypeVar("ChannelT")
Options = list[tuple[str, int]]
# Messages are bounded by the server alone; keepalive finds dead peers under
# long calls; each client has a connection of its own, so that a large request
# does not hold up those of another.
OPTIONS: Options = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True)
class Security:
    """How to reach the server. All None: plaintext, for loopback."""

    token: str | None = None  # Sent as `authorization: Bearer ...`.
    root_certificates: bytes | None = None  # PEM; turns TLS on.

    def open(
        self,
        target: str,
        insecure: Callable[[str, Options], ChannelT],
        secure: Callable[[str, grpc.ChannelCredentials, Options], ChannelT],
    ) -> ChannelT:
        """A channel, made by those functions of `grpc` or `grpc.aio`."""
        if self.root_certificates is None:
            return insecure(target, OPTIONS)
        credentials = grpc.ssl_channel_credentials(self.root_certificates)
        return secure(target, credentials, OPTIONS)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        if self.token is None:
            return ()
        return (("authorization", f"Bearer {self.token}"),)
