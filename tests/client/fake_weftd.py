"""Starts fake_weftd: the real server, as a program, with canned results
(tests/support/fake_weftd.cc)."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BUILD_DIR = Path(os.environ.get("WEFT_BUILD_DIR", ROOT / "build" / "cpu"))
PROGRAM = BUILD_DIR / "tests" / "support" / "fake_weftd"
GRAD_NORM = 2.5
START_SECONDS = 20.0


def canned_logprobs(targets: np.ndarray) -> np.ndarray:
    """Returns the server's log-probabilities of targets whose weight is not 0."""
    return (-(targets.astype("f8") + 1) / 8).astype("<f4")


def _limit_files(count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


class FakeWeftd:
    """A server on a free port of the loopback interface, as a context manager. A
    method that injects a failure returns when the failure is in effect.

    flags: weftd's flags, added after the flags that every server here has.
    files: the server's limit of open files; None: the same as this process's.
    """

    def __init__(self, *flags: str, files: int | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fake_weftd")
        port_file = Path(self._folder.name) / "ports"
        self._log = (Path(self._folder.name) / "log").open("w+")
        self._process = subprocess.Popen(
            [
                PROGRAM,
                "--listen=127.0.0.1:0",
                "--metrics-listen=127.0.0.1:0",
                f"--port-file={port_file}",
                "--model-name=toy",
                "--log-level=error",
                "--drain-timeout-seconds=1",
                *flags,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            preexec_fn=None if files is None else lambda: _limit_files(files),
        )
        limit = time.monotonic() + START_SECONDS
        self._wait_until(port_file.exists, limit)
        # With --tinker-listen or --console-listen the port file has a third line.
        addresses = [*port_file.read_text().splitlines(), ""]
        self.target, self.metrics, self.http = addresses[:3]
        self._wait_until(self._is_ready, limit)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.metrics}/readyz") as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def _wait_until(self, condition: Any, limit: float) -> None:
        while not condition():
            assert self._process.poll() is None, "fake_weftd has ended"
            assert time.monotonic() < limit, "fake_weftd does not serve"
            time.sleep(0.005)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log.closed:
            return  # The test itself has stopped the process.
        self._process.terminate()
        self._process.communicate()
        sys.stderr.write(self.log())
        self._log.close()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        """Returns what the server has written to stderr so far."""
        return (Path(self._folder.name) / "log").read_text()

    def _say(self, **line: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer
        return answer

    def refuse(self, rpc: str, code: grpc.StatusCode, message: str) -> None:
        """Refuses the next call of this RPC."""
        self._say(do="refuse", rpc=rpc, code=code.value[0], message=message)

    def fail_run(self, rpc: str, code: grpc.StatusCode, message: str) -> None:
        """Makes the next step of this RPC fail when it runs."""
        self._say(do="fail_run", rpc=rpc, code=code.value[0], message=message)

    def lose_reply(
        self,
        rpc: str,
        code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
        message: str = "the reply was lost",
    ) -> None:
        """Runs the next call of this RPC, but replaces its reply by this error."""
        self._say(do="lose_reply", rpc=rpc, code=code.value[0], message=message)

    def retry_hint(self, milliseconds: int | None) -> None:
        """Sets the hint in refusals that tells clients how long to wait before a
        retry. None: refusals have no hint."""
        self._say(do="hint", ms=milliseconds)

    def hold(self) -> None:
        """Stops the server's work until release()."""
        self._say(do="hold")

    def release(self) -> None:
        self._say(do="release")

    def next_export(self, files: dict[str, str]) -> None:
        """Sets the files that the next export sends. The server does not check them."""
        self._say(do="export", files=files)

    def arrived(self) -> list[tuple[str, int]]:
        """Returns RPCs and step numbers of the calls, in the order in which they
        arrived."""
        return [(rpc, step) for rpc, step in self._say(do="calls")["arrived"]]

    def applied(self) -> list[tuple[str, int]]:
        """Returns RPCs and numbers of the steps, in the order in which they ran."""
        return [(rpc, step) for rpc, step in self._say(do="calls")["applied"]]
