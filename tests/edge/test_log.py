"""The edge's log: nobody waits for its reader, and what is not written is counted."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import time
from pathlib import Path

import pytest
from edge_server import EDGE, accepts, wait_until
from test_files import edge_alone

DROPPED = "edge: log lines were dropped"


def num_dropped(lines: list[str]) -> int:
    return sum(json.loads(line)["lines"] for line in lines if DROPPED in line)


def serving(folder: Path, *command: str) -> tuple[subprocess.Popen[str], int]:
    """Returns an edge that serves, and its port. Nobody reads its log."""
    process = edge_alone(folder, *command)
    port = int((folder / "port").read_text())
    wait_until(lambda: accepts(port), lambda: "the edge does not serve", 20)
    return process, port


def caller(port: int) -> http.client.HTTPSConnection:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection("localhost", port, context=context, timeout=8)


def ask(connection: http.client.HTTPSConnection, path: str) -> int:
    connection.request("GET", path)
    reply = connection.getresponse()
    reply.read()
    return reply.status


def test_a_log_that_nobody_reads_stops_nobody(tmp_path: Path) -> None:
    """A request's line has 500 bytes, so the lines fill a pipe of 64 KiB four times."""
    process, port = serving(tmp_path, "sleep", "60")
    stranger, other = caller(port), caller(port)
    waits = []
    # Nothing serves the OpenAI front's port, and such a request is no junk.
    for number in range(500):
        assert ask(stranger, "/v1/" + "x" * 300) == 502
        if number % 100 == 0:
            start = time.monotonic()
            assert ask(other, "/none") == 404
            waits.append(time.monotonic() - start)
    process.send_signal(signal.SIGTERM)
    # `sleep` ends with the status of SIGTERM.
    assert process.wait(10) == 128 + signal.SIGTERM
    assert max(waits) < 2, waits


def test_requests_that_reach_no_server_are_logged_in_part(tmp_path: Path) -> None:
    process, port = serving(tmp_path, "sleep", "60")
    stranger, start = caller(port), time.monotonic()
    for _ in range(100):
        assert ask(stranger, "/none") == 404
        assert ask(stranger, "/v1/models") == 502
    seconds = time.monotonic() - start
    process.send_signal(signal.SIGTERM)
    lines = process.communicate(timeout=20)[0].splitlines()
    junk = sum('"path":"/none"' in line for line in lines)
    assert 20 <= junk <= 20 * (seconds + 2) and junk + num_dropped(lines) == 100
    assert sum('"path":"/v1/models"' in line for line in lines) == 100


def logger() -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([EDGE / "log.pl"], stdin=pipe, stdout=pipe)


def test_lines_that_are_dropped_are_counted() -> None:
    process = logger()
    assert process.stdin is not None and process.stdout is not None
    count = 10_000
    process.stdin.write(b"".join(b"%0300d\n" % n for n in range(count)))
    process.stdin.flush()
    # A mebibyte of lines waits, and what pipes hold is less than that.
    lines: list[str] = []
    while not (lines and DROPPED in lines[-1]):
        lines.append(process.stdout.readline().decode())
        assert lines[-1], "the logger has ended"
    assert [int(line) for line in lines[:-1]] == list(range(len(lines) - 1))
    assert 3000 < len(lines) < 8000
    assert len(lines) - 1 + num_dropped(lines) == count
    process.stdin.write(b"the last line\n")
    process.stdin.close()
    assert process.stdout.read() == b"the last line\n"
    assert process.wait(10) == 0


def test_the_logger_ends_although_nobody_reads() -> None:
    process = logger()
    assert process.stdin is not None
    process.stdin.write(b"a line\n" * 100_000)
    process.stdin.close()
    assert process.wait(10) == 0


def test_nginx_and_the_command_end_if_run_sh_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # It removes no files then.
    process, port = serving(
        tmp_path, "sh", "-c", f"echo $$ >{tmp_path}/pid; exec sleep 60"
    )
    wait_until((tmp_path / "pid").read_text, lambda: "the command was not started")
    command = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()

    def have_ended() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            return not accepts(port)
        with contextlib.suppress(ProcessLookupError):
            os.kill(command, 0)
            return False
        return True

    wait_until(have_ended, lambda: "they go on", 10)
