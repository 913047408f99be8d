"""What is around a running weftd changes: its clock, the reader of its log, signals.
It goes on."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import daemon as daemon_module
import pytest
from durable import Durable
from models import tiny_model
from raw import Raw, datum
from shifted_clock import ShiftedClock
from texts import random_tokens

DATA = [datum(random_tokens(320, 10, 1))]
# absl's clock follows a change of the wall clock only after about two seconds.
FOLLOWS = 3.0


class Clock(ShiftedClock):
    """The wall clock of a daemon."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.daemon = daemon_module.Daemon(tiny_model("llama-tied"), folder / "weftd")
        self.daemon.start_with(*self.launcher)


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[Clock]:
    clock = Clock(tmp_path)
    yield clock
    assert clock.daemon.stop() == 0, clock.daemon.log_tail()


@pytest.mark.parametrize("seconds", [45 * 60, -3600, 7 * 86400])
def test_a_set_clock_ends_nothing(clock: Clock, seconds: int) -> None:
    """The watchdog, liveness and deadlines count the time that has passed."""
    with Raw(clock.daemon.address) as raw:
        assert raw.create("a", rank=2).code == "OK"
        clock.set(seconds)
        end = time.monotonic() + FOLLOWS
        step = 0
        while time.monotonic() < end:
            step += 1
            outcome = raw.forward_backward("a", DATA, step=step, timeout=2.0)
            assert outcome.code == "OK", (step, outcome)
            time.sleep(0.05)
        assert "watchdog_trips_total 0" in clock.daemon.scrape()
        assert "weft_disk_free_bytes" in clock.daemon.scrape()


def test_checkpoints_keep_their_order_when_the_clock_goes_back(clock: Clock) -> None:
    with clock.daemon.client() as client:
        adapter = client.create_adapter("a", rank=2)
        for number in range(1, 6):
            if number == 4:
                clock.set(-3600)
                time.sleep(FOLLOWS)
            adapter.save(f"s{number}", keep_newest=3)
        names = [checkpoint.name for checkpoint in client.checkpoints("a")]
        assert names == ["s5", "s4", "s3"]


def test_a_log_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    daemon = daemon_module.Daemon(
        tiny_model("llama-tied"), tmp_path / "weftd", "--log-level", "debug"
    )
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    try:
        with os.fdopen(write, "wb") as pipe:
            daemon.start(log=pipe)
        with Raw(daemon.address) as raw:
            assert raw.create("a", rank=2).code == "OK"
            # Several times what fits in the pipe.
            for step in range(1, 101):
                outcome = raw.forward_backward("a", DATA, step=step, timeout=10.0)
                assert outcome.code == "OK", (step, outcome)
        assert daemon.stop() == 0
    finally:
        os.close(read)
        daemon.kill()


def test_signals_of_others_end_nothing(clock: Clock) -> None:
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        os.kill(clock.daemon.pid, number)
    with Raw(clock.daemon.address) as raw:
        assert raw.create("a", rank=2).code == "OK"
    limit = time.monotonic() + 10
    while clock.daemon.log_tail().count("a signal without effect") < 4:
        assert time.monotonic() < limit, clock.daemon.log_tail()
        time.sleep(0.05)


def test_a_log_that_cannot_be_written_ends_the_process_soon(durable: Durable) -> None:
    """The step that waits for the disk gets no answer, and holds nothing up."""
    daemon = durable.start(failpoints="journal.sync=err(EIO)#4-9999")
    with Raw(daemon.address) as raw:
        assert raw.create("a", rank=2).code == "OK"
        outcome = raw.optim_step("a")
        while outcome.code == "OK":
            outcome = raw.optim_step("a")
        assert outcome.code == "UNAVAILABLE", outcome
    assert daemon.wait(5) == 1
    failed = [line for line in daemon.log_tail().splitlines() if "has failed" in line]
    told = datetime.fromisoformat(json.loads(failed[-1])["ts"]).timestamp()
    assert time.time() - told < 2.5, daemon.log_tail()


# Root has no limit of processes, so weftd runs as a user who may read all files.
AS_USER = (
    *("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"),
    *(f"--{kind}=-all,+dac_override" for kind in ("inh-caps", "ambient-caps")),
)


def with_processes(limit: int, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["prlimit", f"--nproc={limit}", *AS_USER, *command],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("limit", [2, 8, 16, 24])
def test_a_limit_of_processes_is_named(limit: int) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may become another user")
    if with_processes(1, "sh", "-c", "true & wait").returncode == 0:
        pytest.skip("the system does not limit the processes of a user")
    model = str(tiny_model("llama-tied").resolve())
    flags = ("--model", model, "--listen", "127.0.0.1:0", "--metrics-listen=")
    done = with_processes(limit, str(daemon_module.WEFTD), *flags)
    assert done.returncode == 1, done
    assert "weftd: cannot start a thread (the limit of processes" in done.stderr
    assert "pids.max" in done.stderr and len(done.stderr.splitlines()) == 1


def test_closed_descriptors_stay_out_of_the_way(tmp_path: Path) -> None:
    model = tiny_model("llama-tied").resolve()
    ports = tmp_path / "ports"
    process = subprocess.Popen(
        f"exec {daemon_module.WEFTD} --model {model} --listen 127.0.0.1:0"
        f" --metrics-listen= --port-file {ports} <&- >&- 2>&-",
        shell=True,
        cwd=tmp_path,
    )
    try:
        limit = time.monotonic() + daemon_module.START_SECONDS
        while not ports.exists():
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.05)
        for number in range(3):
            link = os.readlink(f"/proc/{process.pid}/fd/{number}")
            assert link == "/dev/null", (number, link)
    finally:
        process.kill()
        process.wait()
