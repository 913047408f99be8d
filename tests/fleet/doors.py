"""Daemons of a fleet with an edge in front of each, as deploy/edge/run.sh starts it."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import daemon as daemon_module
import grpc
from members import Fleet, Member

_TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(_TESTS / name) for name in ("edge", "deploy", "client")]

from deploy_files import run  # noqa: E402
from edge_server import EDGE, accepts, configuration, wait_until  # noqa: E402
from token_file import Tokens  # noqa: E402

import weft  # noqa: E402

NAME = "localhost"  # All edges have one certificate.
HOST = "127.0.0.1"


class Site:
    """A daemon and its edge, by whose address everybody knows the two."""

    def __init__(self, doors: Doors, name: str) -> None:
        self._flags = ["--mtls"] if doors.client_certificate else []
        self._folder = doors.folder / f"{name}-edge"
        self._port = daemon_module.free_port()
        self._tinker = f"{HOST}:{daemon_module.free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"{HOST}:{self._port}"
        self.url = f"https://{self.address}"
        self.log_path = doors.folder / f"{name}-edge.log"
        shutil.copytree(doors.tls, self._folder / "tls")
        self.member: Member = doors.fleet.add(
            name,
            *("--logs", str(doors.logs), "--model-name", "toy"),
            *("--advertise-address", self.address, "--tinker-listen", self._tinker),
            *("--auth-tokens-file", str(doors.tokens.path)),
            *("--max-message-bytes", str(64 << 20)),
            *doors.flags,
        )

    def open(self) -> None:
        """Starts the edge. The daemon must run."""
        ports = {
            50051: self.member.listen,
            9400: self.member.metrics_address,
            8460: self._tinker,
        }
        conf = self._folder / "nginx.conf"
        conf.write_text(configuration(ports, self._port))
        command = [str(EDGE / "run.sh"), "--dir", str(self._folder), "--fleet", NAME]
        command += self._flags
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(lambda: accepts(self._port), self.log)

    def show_strangers_certificate(self) -> None:
        """From now on the edge shows one for the same names that another authority has
        signed."""
        other = self._folder / "other"
        run(str(EDGE / "certificate.sh"), "--dir", str(other), NAME, HOST)
        for name in ("tls.crt", "tls.key"):
            shutil.copy(other / "tls" / name, self._folder / "tls" / name)
        context = ssl.create_default_context(cafile=str(other / "tls" / "ca.crt"))

        def shows() -> bool:  # An SSLError is an OSError.
            with socket.create_connection((HOST, self._port)) as plain:
                context.wrap_socket(plain, server_hostname=NAME).close()
            return True

        wait_until(shows, self.log)

    def close(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)

    def log(self) -> str:
        return self.log_path.read_text("utf-8", errors="replace")

    def lines(self, path: str) -> list[str]:
        """Returns the log's lines of requests for a path."""
        return [line for line in self.log().splitlines() if f'"path":"{path}"' in line]

    def handled(self, method: str) -> float:
        """Returns how many calls of a method the daemon has answered."""
        pattern = rf'^grpc_server_handled_total{{.*grpc_method="{method}".*}} (\S+)$'
        return sum(map(float, re.findall(pattern, self.member.scrape(), re.M)))


class Doors:
    """The sites of a fleet, and what their clients need."""

    def __init__(
        self, fleet: Fleet, mtls: bool = False, logs: int = 2, flags: Sequence[str] = ()
    ) -> None:
        self.fleet = fleet
        self.logs = logs
        self.flags = flags  # Of all daemons.
        self.folder = fleet.folder
        make = [str(EDGE / "certificate.sh"), "--dir", str(self.folder / "ca")]
        run(*make, NAME, HOST)
        self.tls = self.folder / "ca" / "tls"
        # Certificate and key of a client, if edges want one.
        self.client_certificate: tuple[Path, Path] | None = None
        if mtls:
            run(*make, "--client", "alice")
            stem = self.folder / "ca" / "clients" / "alice"
            self.client_certificate = stem.with_suffix(".crt"), stem.with_suffix(".key")
        self.ca = self.tls / "ca.crt"
        self.tokens = Tokens(self.folder / "tokens")
        self.alice = self.tokens.add("alice", "alice", "train", "sample")
        self.bob = self.tokens.add("bob", "bob", "train", "sample")
        self.root = self.tokens.add("root", "ops", "admin")
        self.sites: list[Site] = []

    def add(self, name: str, phase: str = "serving") -> Site:
        site = Site(self, name)
        self.sites.append(site)
        site.member.wait_for(phase)
        site.open()
        return site

    def __enter__(self) -> Doors:
        return self

    def __exit__(self, *_: object) -> None:
        for site in self.sites:
            site.close()

    def environment(self) -> dict[str, str]:
        return {"TINKER_API_KEY": f"tml-{self.alice}", "SSL_CERT_FILE": str(self.ca)}

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        if self.client_certificate is not None:
            context.load_cert_chain(*self.client_certificate)
        return context

    def client(self, site: Site, token: str, **options: Any) -> weft.Client:
        security = weft.Security(token=token, root_certificates=self.ca.read_bytes())
        return weft.Client(site.address, security=security, **options)

    def call(
        self, site: Site, token: str, method: Any, request: Any, **headers: str
    ) -> tuple[str, Any]:
        """Makes a call that no client repeats or sends elsewhere. Returns the code, and
        the reply or the message."""
        names = {key.replace("_", "-"): value for key, value in headers.items()}
        metadata = [("authorization", f"Bearer {token}"), *names.items()]
        shown = [file.read_bytes() for file in self.client_certificate or ()]
        certificate, key = shown or (None, None)
        credentials = grpc.ssl_channel_credentials(
            self.ca.read_bytes(), key, certificate
        )
        options = [("grpc.use_local_subchannel_pool", 1)]
        with contextlib.closing(
            grpc.secure_channel(site.address, credentials, options)
        ) as channel:
            try:
                bound = method.bind(channel)
                return "OK", bound(request, timeout=60.0, metadata=metadata)
            except grpc.RpcError as error:
                return error.code().name, error.details()
