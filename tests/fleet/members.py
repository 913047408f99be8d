"""Daemons that share one state in an object store."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import daemon as daemon_module
import models
import raw
from durable import KIND
from stores import Store

from weft import methods
from weft._proto import adapters_pb2

SECONDS = 60.0
WEFTCTL = daemon_module.BUILD_DIR / "client" / "weftctl" / "weftctl"


class Member(daemon_module.Daemon):
    """A daemon that may stand by. It keeps its name and its port when it restarts."""

    def __init__(
        self,
        folder: Path,
        url: str,
        environment: dict[str, str],
        *flags: str,
        kind: str = KIND,
    ) -> None:
        self.name = folder.name
        self._environment = environment
        self.listen = f"127.0.0.1:{daemon_module.free_port()}"
        super().__init__(
            models.tiny_model(kind),
            folder,
            *("--state", url, "--instance", folder.name),
            *("--listen", self.listen),
            *flags,
        )

    def launch(self, log: Any = None) -> None:
        kept = dict(os.environ)
        os.environ.update(self._environment)
        try:
            super().launch(log)
        finally:
            os.environ.clear()
            os.environ.update(kept)

    def launch_with(self, *launcher: str) -> None:
        """Starts the process through another program, given with its arguments."""
        self._arguments[:0] = launcher
        self.launch()

    def wait_for(self, *phases: str) -> str:
        """Waits for a phase of the start, and returns it."""
        limit = time.monotonic() + SECONDS
        self._wait_for_ports(limit)
        while True:
            self._expect_alive(limit, f"did not reach {phases}")
            for phase in phases:
                if self.metric("weft_startup_phase", f'phase="{phase}"') == 1:
                    return phase
            time.sleep(0.02)

    def value(self, name: str) -> float:
        """Returns a metric that has one series without labels."""
        (found,) = re.findall(rf"^{name} (\S+)$", self.scrape(), re.MULTILINE)
        return float(found)

    def serves(self) -> bool:
        """Returns at once whether the process runs calls."""
        return self._page("/readyz") is not None

    def served_log(self) -> int | None:
        """Returns at once which log the process has."""
        found = re.search(r"^weft_state_log (\d+)$", self._page("/metrics") or "", re.M)
        return int(found[1]) if found else None

    def _page(self, path: str) -> str | None:
        """Returns a page of the metrics' address, or None if it is not ready."""
        with suppress(OSError, IndexError):
            address = self._port_file.read_text("ascii").split()[1]
            with urllib.request.urlopen(f"http://{address}{path}", timeout=0.5) as page:
                return str(page.read(), "utf-8")
        return None

    def exit_code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def facts(self, adapter_id: str) -> Any:
        """Returns the outcome of a GetAdapter."""
        request = adapters_pb2.GetAdapterRequest(adapter_id=adapter_id)
        return self.call(methods.GET_ADAPTER, request)

    def call(self, method: Any, request: Any) -> Any:
        """Returns the outcome of an RPC, which no client repeats."""
        with raw.Raw(self.address) as channel:
            return channel.call(method, request)

    def log_text(self) -> str:
        return self.log_path.read_text()


class Fleet:
    """All daemons of one prefix."""

    def __init__(self, folder: Path, url: str, environment: dict[str, str]) -> None:
        self.folder = folder
        self.url = url
        self.environment = environment
        self.members: list[Member] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.kill()

    def add(
        self, name: str, *flags: str, environment: dict[str, str] | None = None
    ) -> Member:
        """Starts a daemon and does not wait for it. `environment` replaces that of the
        fleet."""
        environment = environment or self.environment
        member = Member(self.folder / name, self.url, environment, *flags)
        self.members.append(member)
        member.launch()
        return member


def run_weftctl(
    store: Store, *words: Any, token: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [WEFTCTL, *map(str, words), "-o", "json"],
        env={**store.environment(), "WEFT_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=60,
    )


def weftctl(store: Store, *words: Any) -> Any:
    """Returns what a command of weftctl prints as JSON."""
    result = run_weftctl(store, *words)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def pair(fleet: Fleet, *flags: str) -> tuple[Member, Member]:
    """Returns an owner that serves and a daemon that stands by."""
    owner = fleet.add("a", *flags)
    owner.wait_for("serving")
    standby = fleet.add("b", *flags)
    standby.wait_for("standby")
    return owner, standby
