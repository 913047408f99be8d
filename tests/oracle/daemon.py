"""Runs the real daemon as a child process and talks to it over loopback."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

# The device and the dtype of every weftd in the oracle and end-to-end tests.
DEVICE = os.environ.get("WEFT_TEST_DEVICE", "cpu")
DTYPE = os.environ.get("WEFT_TEST_DTYPE", "f32")
if DEVICE not in ("cpu", "cuda") or DTYPE not in ("f32", "bf16"):
    raise SystemExit(
        f"WEFT_TEST_DEVICE={DEVICE}, WEFT_TEST_DTYPE={DTYPE}: must be cpu or cuda, and"
        " f32 or bf16"
    )
REPOSITORY = Path(__file__).resolve().parents[2]
BUILD_DIR = Path(
    os.environ.get("WEFT_BUILD_DIR", REPOSITORY / "build" / "cpu")
).resolve()
WEFTD = BUILD_DIR / "server" / "weftd"
START_SECONDS = 120.0
STOP_SECONDS = 60.0

# The daemons that are running, so that a failing test can show their logs.
LIVE: list[Daemon] = []


def processor_seconds(pid: int) -> float:
    """Returns the processor time that a process has taken."""
    values = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def wait_until(holds: Callable[[], object], otherwise: str = "") -> None:
    """Waits up to STOP_SECONDS. `otherwise` says what is wrong then."""
    limit = time.monotonic() + STOP_SECONDS
    while not holds():
        assert time.monotonic() < limit, otherwise
        time.sleep(0.005)


def free_port() -> int:
    """Returns a port that stays free until a daemon takes it, and while the daemon
    restarts. The kernel gives a port below 32768 only to a process that asks for
    this port."""
    while True:
        port = random.randrange(20000, 32000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


class Daemon:
    """One weftd process. `address` and `metrics_address` are HOST:PORT."""

    def __init__(
        self, model: Path, folder: Path, *flags: str, program: Path | None = None
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.resolve()
        self.checkpoint_dir = folder / "checkpoints"  # The default of weftd.
        self.log_path = folder / "weftd.log"
        self._port_file = self._folder / "ports"
        self._arguments = [
            str(program or WEFTD),
            *("--model", str(model.resolve())),
            *("--listen", "127.0.0.1:0"),
            *("--metrics-listen", "127.0.0.1:0"),
            *("--port-file", str(self._port_file)),
            *("--device", DEVICE),
            *("--dtype", DTYPE),
            *flags,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        self.metrics_address = ""

    def __enter__(self) -> Daemon:
        """Starts the process unless it was launched. It is killed afterwards, because
        that is faster than a stop."""
        if self._process is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def launch(self, log: IO[bytes] | None = None) -> None:
        """Starts the process and does not wait for it. Its log goes to `log`, or to
        log_path."""
        self._port_file.unlink(missing_ok=True)
        log = log or self.log_path.open("ab")
        self._process = subprocess.Popen(
            self._arguments,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Keeps f32 exact, without TF32 in matrix products.
            env={"NVIDIA_TF32_OVERRIDE": "0", **os.environ},
        )
        log.close()

    def start(self, log: IO[bytes] | None = None) -> None:
        """Starts the process and waits until it serves all adapters."""
        self.launch(log)
        self.wait_until_serving()
        self.wait_until_restored()

    def wait_until_restored(self) -> None:
        """Waits until the log is replayed. Earlier builds, which some benches run, lack
        this metric. They are SERVING only after they have replayed the log."""
        limit = time.monotonic() + START_SECONDS
        while re.search(r"^weft_adapters_recovering [1-9]", self.scrape(), re.M):
            self._expect_alive(limit, "did not restore all adapters")
            time.sleep(0.01)

    def wait_until_serving(self) -> None:
        """Waits until the metrics port says that weftd takes work."""
        LIVE.append(self)
        limit = time.monotonic() + START_SECONDS
        self._wait_for_ports(limit)
        while not self._is_ready():
            self._expect_alive(limit, "did not become ready")
            time.sleep(0.02)

    def start_with(self, *launcher: str, log: IO[bytes] | None = None) -> None:
        """Starts weftd through another program, given with its arguments."""
        self._arguments[:0] = launcher
        self.start(log)

    def client(self, **options: Any) -> Any:
        import weft

        return weft.Client(self.address, **{"timeout": 300.0, **options})

    def scrape(self) -> str:
        """Returns the text of the metrics page."""
        url = f"http://{self.metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            return str(response.read().decode("utf-8"))

    def metric(self, name: str, labels: str) -> float:
        """Returns the sum of the matching series. `labels` is a regular expression
        without groups for a part of the labels."""
        pattern = re.compile(rf"^{name}{{.*{labels}.*}} (\S+)$", re.MULTILINE)
        return sum(map(float, pattern.findall(self.scrape())))

    def wait_for_metric(self, name: str, labels: str, least: float) -> None:
        """Waits until the sum of the matching series is at least `least`."""
        limit = time.monotonic() + STOP_SECONDS
        while self.metric(name, labels) < least:
            self._expect_alive(limit, f"did not count {least} of {name}")
            time.sleep(0.01)

    def wait_for_calls(self, method: str, count: int) -> None:
        """Waits until `count` calls of this RPC are in the queue or have run."""
        labels = f'grpc_method="{method}"'
        self.wait_for_metric("grpc_server_started_total", labels, count)
        time.sleep(0.1)  # Until the calls that have arrived are in the queue.

    def wait_for_drain(self) -> None:
        self.wait_for_metric("weft_startup_phase", 'phase="draining"', 1)

    def terminate(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Returns the exit code. The process must end within `seconds`."""
        assert self._process is not None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"weftd still ran {seconds} s later\n{self.log_tail()}"
            ) from None

    def ends_within(self, seconds: float) -> bool:
        """Returns whether the process ends by itself within `seconds`."""
        assert self._process is not None
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> int:
        """Sends SIGTERM and returns the exit code."""
        self.terminate()
        code = self.wait()
        if self in LIVE:
            LIVE.remove(self)
        return code

    def kill(self) -> None:
        """Sends SIGKILL, so that the process cannot clean up."""
        if self in LIVE:
            LIVE.remove(self)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def log_tail(self, lines: int = 60) -> str:
        if not self.log_path.exists():
            return "(no log)"
        text = self.log_path.read_text("utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def last_log_time(self) -> float:
        """Returns when the last line of the log was written, in the form of
        time.time()."""
        stamp = json.loads(self.log_tail(1))["ts"]
        return datetime.fromisoformat(stamp).timestamp()

    def peak_resident_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text("ascii")
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmHWM in /proc/PID/status")

    def _wait_for_ports(self, limit: float) -> None:
        while True:
            if self._port_file.exists():
                lines = self._port_file.read_text("ascii").split()
                if len(lines) >= 2:
                    self.address, self.metrics_address = lines[0], lines[1]
                    return
            self._expect_alive(limit, "wrote no port file")
            time.sleep(0.02)

    def _expect_alive(self, limit: float, what: str) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is None and time.monotonic() < limit:
            return
        self.kill()
        raise AssertionError(f"weftd {what} (exit code {code})\n{self.log_tail()}")

    def _is_ready(self) -> bool:
        # Earlier builds, which some benches run, have no /readyz.
        with suppress(OSError):
            return 'weft_startup_phase{phase="serving"} 1' in self.scrape()
        return False


def num_devices() -> int:
    """Returns the number of CUDA devices of this machine."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except FileNotFoundError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


@contextmanager
def running(model: Path, folder: Path, *flags: str) -> Iterator[Daemon]:
    """A serving daemon that must end cleanly on SIGTERM afterwards."""
    daemon = Daemon(model, folder, *flags)
    daemon.start()
    try:
        yield daemon
    except BaseException:
        daemon.kill()
        raise
    assert daemon.stop() == 0, daemon.log_tail()
