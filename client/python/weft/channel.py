"""Opens a client's channel to its server: plaintext, TLS or mutual TLS."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from weft.errors import FailedPrecondition, InvalidArgument

ChannelT = TypeVar("ChannelT", bound=grpc.Channel | grpc.aio.Channel)
Options = list[tuple[str, int | str]]
# Only the server limits the size of messages. Keepalive finds a dead server during
# long calls. Each client has its own connection, so that its large requests do not
# delay other clients.
OPTIONS: Options = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A machine that dies says nothing, and another may have its state in seconds.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # gRPC takes it for the time limit of a connection, too.
    ("grpc.min_reconnect_backoff_ms", 2_500),
    ("grpc.dns_ares_query_timeout", 2_500),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.use_local_subchannel_pool", 1),
]


_HOST_SCHEME = re.compile(r"dns:(//[^/]*/)?|ipv4:|ipv6:")
_SOCKETS = ("unix:", "unix-abstract:")
SCHEMES = (*_SOCKETS, "dns:", "ipv4:", "ipv6:", "vsock:", "xds:")
_ADDRESS = re.compile(r"(\[[^\[\]]+\]|[^:/\[\]@]+):(\d{1,5})")


def _plain(target: str) -> str:
    """Returns a target without gRPC's scheme of a host: HOST:PORT."""
    match = _HOST_SCHEME.match(target)
    return target[match.end() :] if match else target


def check_target(target: str) -> None:
    """Raises InvalidArgument for a target that is not HOST:PORT, optionally with one of
    gRPC's schemes. gRPC itself would take the scheme of a URL for a host, and look for
    it in DNS until the call's deadline."""
    if not isinstance(target, str):
        raise InvalidArgument(f"target is {target!r}, must be a text, HOST:PORT")
    if target.startswith((*_SOCKETS, "vsock:", "xds:")):
        return
    plain = _plain(target)
    if all(
        (match := _ADDRESS.fullmatch(one)) and 0 < int(match[2]) < 65536
        for one in plain.split(",")
    ):
        return
    text = f"target is {target[:80]!r}, must be HOST:PORT"
    scheme, mark, rest = plain.partition("://")
    if mark:
        tls = " and use TLS" if scheme == "https" else ""
        text += f": write {rest.partition('/')[0][:80]!r}{tls}"
    elif plain and ":" not in plain:
        text += (
            f": write '{plain.strip()[:80]}:50051', with the port of weftd's --listen"
        )
    raise InvalidArgument(text)


def is_local(target: str) -> bool:
    """Returns whether the target is on this machine, where plaintext is private. Local
    targets are loopback addresses, localhost and unix:PATH."""
    if target.startswith(_SOCKETS):
        return True
    host = _plain(target).rpartition(":")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def clean_token(token: str, source: str) -> str:
    """Returns a token without the whitespace around it, such as the newline at the end
    of a file.

    source: where the token comes from, for the error. Raises InvalidArgument, without
    the token, if a character remains that no token has. gRPC would print the token.
    """
    token = token.strip()
    if not all("!" <= character <= "~" for character in token):
        raise InvalidArgument(
            f"{source} has a token with a character that is not visible ASCII, which "
            "no token has: copy the token again"
        )
    return token


def read_token(path: Path) -> str:
    """Returns the token in a file. Raises InvalidArgument if the file has none."""
    # An editor may put a byte order mark before the text.
    text = path.read_bytes().decode("utf-8-sig", "replace")
    token = clean_token(text, f"the file {path}")
    if not token:
        raise InvalidArgument(f"the file {path} has no token, must have one")
    return token


def system_roots() -> bytes | None:
    """Returns the certificate authorities that the system trusts, in PEM.

    None makes grpcio use its own list of authorities.
    """
    file = ssl.get_default_verify_paths().cafile
    return None if file is None else Path(file).read_bytes()


@dataclass(frozen=True)
class Security:
    """The credentials of a client. Without TLS the channel is plaintext, and a token is
    then sent only to a target on this machine."""

    token: str | None = None  # Sent as `authorization: Bearer ...`.
    tls: bool = False  # Uses TLS with the system's authorities.
    root_certificates: bytes | None = None  # PEM, replaces the system's; implies TLS.
    certificate: bytes | None = None  # PEM, with its key for mutual TLS; implies TLS.
    private_key: bytes | None = None  # PEM.
    server_name: str | None = None  # Name in the server's certificate; None: the host.

    def __post_init__(self) -> None:
        token = clean_token(self.token or "", "the argument token")
        object.__setattr__(self, "token", token or None)

    @classmethod
    def from_environment(cls) -> Security:
        """Reads the environment variables of weftctl: WEFT_TOKEN, WEFT_TOKEN_FILE,
        WEFT_TLS=1, WEFT_CA, WEFT_CLIENT_CERT, WEFT_CLIENT_KEY, WEFT_SERVER_NAME.

        Raises OSError if a file that a variable names cannot be read, InvalidArgument
        if a token has characters that no token has.
        """

        def contents(name: str) -> bytes | None:
            path = os.environ.get(name)
            return Path(path).read_bytes() if path else None

        token = clean_token(os.environ.get("WEFT_TOKEN", ""), "WEFT_TOKEN")
        if not token and (path := os.environ.get("WEFT_TOKEN_FILE")):
            token = read_token(Path(path))
        return cls(
            token=token,
            tls=os.environ.get("WEFT_TLS") == "1",
            root_certificates=contents("WEFT_CA"),
            certificate=contents("WEFT_CLIENT_CERT"),
            private_key=contents("WEFT_CLIENT_KEY"),
            server_name=os.environ.get("WEFT_SERVER_NAME") or None,
        )

    def __repr__(self) -> str:
        """Leaves out the secrets, because a traceback or a log may show this text."""
        return f"Security(tls={self._uses_tls()}, token={self.token is not None})"

    def _uses_tls(self) -> bool:
        return self.tls or bool(self.root_certificates or self.certificate)

    def check(self, target: str) -> None:
        """Checks what `open` needs.

        Raises FailedPrecondition if a token would leave this machine in plaintext,
        InvalidArgument for a target that is not HOST:PORT, for a certificate without
        its key, a key alone, or authorities that are not PEM.
        """
        check_target(target)
        roots = self.root_certificates
        if roots is not None and b"-----BEGIN CERTIFICATE-----" not in roots:
            raise InvalidArgument(
                "root_certificates (WEFT_CA) holds no certificate in PEM, must begin "
                "with -----BEGIN CERTIFICATE-----"
            )
        if (self.certificate is None) != (self.private_key is None):
            raise InvalidArgument("certificate and private_key go together")
        if self.token and not self._uses_tls() and not is_local(target):
            raise FailedPrecondition(
                "the token would be sent in plaintext, for anybody on the "
                "way to read: use TLS"
            )

    def open(
        self,
        target: str,
        insecure: Callable[[str, Options], ChannelT],
        secure: Callable[[str, grpc.ChannelCredentials, Options], ChannelT],
    ) -> ChannelT:
        """Opens a channel with `insecure` or `secure`, which are functions of grpc or
        grpc.aio. Raises what `check` raises."""
        self.check(target)
        options = list(OPTIONS)
        if is_local(target):
            # A proxy that the environment names would look for this machine's server
            # on its own machine, and send the token there.
            options.append(("grpc.enable_http_proxy", 0))
        if not self._uses_tls():
            return insecure(target, options)
        credentials = grpc.ssl_channel_credentials(
            self.root_certificates or system_roots(), self.private_key, self.certificate
        )
        if self.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        return secure(target, credentials, options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of each call: the token, if there is one."""
        if self.token is None:
            return ()
        return (("authorization", f"Bearer {self.token}"),)
