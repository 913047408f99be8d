"""Tests deploy/start.sh with a stand-in for weftd, which loads as a test wants."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from deploy_files import DEPLOY

# Writes a log line each 0.2 s while it loads, for WEFTD_LOADS seconds. Says that it is
# ready on its metrics port, or in its log if it has none.
WEFTD = r"""
import http.server, os, sys, threading, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("info started with", *sys.argv[1:], file=sys.stderr, flush=True)
if "--fail" in flags:
    sys.exit(1)
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if READY else 503)
        self.end_headers()
    def log_message(self, *words):
        pass
READY = False
metrics = ""
if flags.get("--metrics-listen") != "":
    server = http.server.HTTPServer(("127.0.0.1", 0), Ready)
    metrics = "127.0.0.1:%d" % server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
with open(flags["--port-file"] + ".tmp", "w") as file:
    file.write("%s\n%s\n" % (flags["--listen"], metrics))
os.rename(file.name, flags["--port-file"])
end = time.monotonic() + float(os.environ.get("WEFTD_LOADS", "0.3"))
while time.monotonic() < end:
    time.sleep(0.2)
    if "--silent" not in flags:
        print("info loading weights", file=sys.stderr, flush=True)
READY = True
print("2026-01-01T00:00:00Z info serving model=m", file=sys.stderr, flush=True)
time.sleep(60)
"""


class Checkout:
    """A checkout with start.sh and a weftd that loads nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run_folder = root / "run" / "quickstart"
        weftd = root / "build" / "cpu" / "server" / "weftd"
        weftd.parent.mkdir(parents=True)
        weftd.write_text(f"#!{sys.executable}\n{WEFTD}")
        weftd.chmod(0o755)
        script = (DEPLOY / "start.sh").read_text()
        limit = "SILENCE_LIMIT_SECONDS=120"
        assert limit in script
        self.script = root / "deploy" / "start.sh"
        self.script.parent.mkdir()
        self.script.write_text(script.replace(limit, "SILENCE_LIMIT_SECONDS=1"))
        self.script.chmod(0o755)
        self.started: list[int] = []

    def begin(
        self, *words: str, script: Path | None = None, **variables: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [script or self.script, *words],
            cwd=self.root,
            env={**os.environ, **variables},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def start(self, *words: str, script: Path | None = None, **variables: str) -> str:
        """Starts weftd and returns what start.sh prints."""
        process = self.begin(*words, script=script, **variables)
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        self.started += map(int, re.findall(r"kill (\d+)", output))
        return output

    def pid(self, folder: Path | None = None) -> int:
        return int(((folder or self.run_folder) / "pid").read_text())


def runs(pid: int) -> bool:
    """Returns whether the process runs. A zombie has no command line."""
    with suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout(tmp_path / "checkout")
    yield made
    with suppress(OSError):
        made.started.append(made.pid())
    for pid in filter(runs, made.started):
        os.kill(pid, signal.SIGKILL)


def test_a_proxy_for_the_internet_is_not_asked(checkout: Checkout) -> None:
    proxy = "http://proxy.invalid"
    output = checkout.start(http_proxy=proxy, HTTP_PROXY=proxy, no_proxy="")
    assert "weftd serves on 127.0.0.1:" in output


def test_a_server_without_metrics_says_in_its_log_that_it_serves(
    checkout: Checkout,
) -> None:
    begin = time.monotonic()
    output = checkout.start("--metrics-listen", "", WEFTD_LOADS="1")
    assert "weftd serves on" in output and time.monotonic() - begin >= 1


def test_a_server_is_found_by_each_name_of_its_folder(
    checkout: Checkout, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(checkout.root)
    linked = tmp_path / "link" / "deploy" / "start.sh"
    checkout.start()
    first = checkout.pid()
    stopped = f"Stopping the server that runs: process {first}\n"
    assert checkout.start(script=linked).startswith(stopped)
    assert not runs(first)
    checkout.start("--folder", "other")
    first = checkout.pid(checkout.root / "other")
    stopped = f"Stopping the server that runs: process {first}\n"
    folder = str(tmp_path / "link" / "other")
    assert checkout.start("--folder", folder).startswith(stopped)
    assert not runs(first) and runs(checkout.pid(checkout.root / "other"))


def test_of_two_starts_at_once_one_starts(checkout: Checkout) -> None:
    first = checkout.begin(WEFTD_LOADS="1")
    while not (checkout.run_folder / "pid").exists():
        time.sleep(0.01)
    second = checkout.begin()
    _, errors = second.communicate(timeout=20)
    assert second.returncode == 1
    assert "Another deploy/start.sh is starting a server in" in errors
    output, _ = first.communicate(timeout=20)
    assert f"kill {checkout.pid()}\n" in output and runs(checkout.pid())


def test_a_model_may_load_as_long_as_the_log_moves(checkout: Checkout) -> None:
    """The limit is one second here."""
    assert "weftd serves on" in checkout.start(WEFTD_LOADS="4")


def test_a_silent_start_is_left_to_the_user(checkout: Checkout) -> None:
    process = checkout.begin("--silent", "", WEFTD_LOADS="20")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert f"its end: kill {checkout.pid()}\n" in errors and runs(checkout.pid())


def test_the_log_of_the_run_before_is_kept(checkout: Checkout) -> None:
    process = checkout.begin("--fail", "crashed")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1 and "weftd has ended" in errors
    assert not (checkout.run_folder / "pid").exists()
    checkout.start()
    assert "crashed" in (checkout.run_folder / "weftd.log.1").read_text()


def test_the_next_start_is_printed_as_a_shell_takes_it(checkout: Checkout) -> None:
    words = ["--folder", "a folder", "--model", "it's"]
    output = checkout.start(*words)
    found = re.search(r"Its next start: (.*) \(the adapters are still there\)", output)
    assert found and shlex.split(found[1]) == [str(checkout.script), *words]
    checkout.started.append(checkout.pid(checkout.root / "a folder"))
