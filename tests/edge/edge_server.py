"""A weftd behind nginx, which runs with the shipped configuration: only addresses and,
where a test asks for it, timeouts differ."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import daemon as daemon_module
import models
from deploy_files import DEPLOY, run
from token_file import Tokens

import weft

START_SECONDS = 60.0
EDGE = DEPLOY / "edge"
BUILD_DIR = daemon_module.BUILD_DIR
WEFTCTL = BUILD_DIR / "client" / "weftctl" / "weftctl"
# Words of a log that has the end of a process in it.
CRASH = re.compile(r"SIG[A-Z]+|terminate called|Check failed|ASSERT|stack trace", re.I)


def configuration(ports: dict[int, str], listen: int, scale: int = 1) -> str:
    """Returns nginx.conf with the addresses of a test. Timeouts are `scale` times
    shorter."""
    text = (EDGE / "nginx.conf").read_text()
    for port, address in ports.items():
        old = f"server 127.0.0.1:{port} "
        assert text.count(old) == 1, old
        text = text.replace(old, f"server {address} ")
    assert "listen 8443 " in text
    text = text.replace("listen 8443 ", f"listen 127.0.0.1:{listen} ")
    if scale != 1:
        text = re.sub(
            r"(?<=_timeout )(\d+)s;",
            lambda match: f"{int(match[1]) * 1000 // scale}ms;",
            text,
        )
    return text


class Edge:
    """weftd and the edge, as two processes. `folder` is the edge's DIR."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        model: Path | None = None,
        scale: int = 1,
        mtls: bool = False,
        openai: str | None = None,
    ) -> None:
        self.folder = folder
        self.port = daemon_module.free_port()
        self.target = f"localhost:{self.port}"
        self.url = f"https://localhost:{self.port}"
        self.ca = folder / "tls" / "ca.crt"
        self.log_path = folder / "edge.log"
        self.tokens = Tokens(folder / "tokens")
        self.alice = self.tokens.add("alice", "alice", "train", "sample")
        self.bob = self.tokens.add("bob", "bob", "train", "sample")
        self._scale = scale
        self._openai = openai
        self._command = [str(EDGE / "run.sh"), "--dir", str(folder)]
        self._command += ["--mtls"] if mtls else []
        self._process: subprocess.Popen[bytes] | None = None
        self._http = daemon_module.free_port()
        self.daemon = daemon_module.Daemon(
            model or models.tiny_model("llama-tied"),
            folder / "weftd",
            *("--auth-tokens-file", str(self.tokens.path)),
            *("--tinker-listen", f"127.0.0.1:{self._http}", "--threads", "1"),
            *flags,
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[Edge]:
        """Both processes must end cleanly afterwards."""
        if not self.ca.exists():
            self.make_certificate("localhost", "127.0.0.1")
        self.daemon.launch()
        try:
            wait_until(self.daemon_is_ready, self.daemon.log_tail)
            ports = {
                50051: self.daemon.address,
                9400: self.daemon.metrics_address,
                8460: f"127.0.0.1:{self._http}",
            }
            if self._openai is not None:
                ports[8000] = self._openai
            text = configuration(ports, self.port, self._scale)
            (self.folder / "nginx.conf").write_text(text)
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
            wait_until(self.is_ready, self.log)
            yield self
            assert self.stop() == 0, self.log()
            if not self.daemon.ends_within(0):
                assert self.daemon.stop() == 0, self.daemon.log_tail()
            assert not CRASH.search(self.daemon.log_tail(10_000))
            assert "[alert]" not in self.log(), self.log()
        finally:
            self.stop()
            self.daemon.kill()

    def stop(self) -> int:
        """Ends the edge and returns its exit status."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(START_SECONDS)
        finally:
            self._process.kill()

    def make_certificate(self, *words: str) -> None:
        run(str(EDGE / "certificate.sh"), "--dir", str(self.folder), *words)

    def daemon_is_ready(self) -> bool:
        self.daemon._wait_for_ports(time.monotonic() + START_SECONDS)
        url = f"http://{self.daemon.metrics_address}/readyz"
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)

    def is_ready(self) -> bool:
        """Returns whether nginx has a certificate to show."""
        assert self._process is not None and self._process.poll() is None, self.log()
        with self.connect():
            return True

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_verify_locations(self.ca)
        return context

    def connect(self, *protocols: str) -> ssl.SSLSocket:
        """Returns a TLS connection."""
        context = self.context()
        if protocols:
            context.set_alpn_protocols(list(protocols))
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        return context.wrap_socket(plain, server_hostname="localhost")

    def security(self, token: str | None, **more: Any) -> weft.Security:
        return weft.Security(
            token=token, root_certificates=self.ca.read_bytes(), **more
        )

    def client(self, token: str | None, **options: Any) -> weft.Client:
        """A client that repeats nothing, so that each failure shows."""
        defaults = {"timeout": 60.0, "retry": weft.NO_RETRY}
        return weft.Client(
            self.target, security=self.security(token), **{**defaults, **options}
        )

    def environment(self, token: str) -> dict[str, str]:
        """Returns the environment of other clients' programs."""
        return {
            **os.environ,
            "WEFT_SERVER": self.target,
            "WEFT_TOKEN": token,
            "WEFT_CA": str(self.ca),
            "SSL_CERT_FILE": str(self.ca),
        }

    def log(self) -> str:
        return self.log_path.read_text("utf-8", errors="replace")

    def handled(self, method: str, code: str) -> float:
        """Returns how many calls of a method weftd has answered with a code."""
        pattern = re.compile(
            rf'^grpc_server_handled_total{{(?=.*grpc_method="{method}")'
            rf'(?=.*grpc_code="{code}").*}} (\S+)$',
            re.M,
        )
        return sum(map(float, pattern.findall(self.daemon.scrape())))


def accepts(port: int) -> bool:
    """Returns whether the edge serves. Otherwise raises OSError. `nginx -t`, with which
    the edge starts, listens for a moment, too, but speaks no TLS."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 5) as plain:
        context.wrap_socket(plain).close()
    return True


def wait_until(ready: Any, log: Any, seconds: float = START_SECONDS) -> None:
    """Waits until `ready()` is true. OSError means not yet."""
    limit = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if ready():
                return
        assert time.monotonic() < limit, log()
        time.sleep(0.05)
