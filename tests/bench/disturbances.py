"""A weftd whose surroundings change all the time: its wall clock, its share of the
processors, the reader of its log. From time to time it is stopped for some seconds."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import daemon
import quota
from shifted_clock import ShiftedClock

CLOCKS = (0, 45 * 60, -3600, 7 * 86400)  # Seconds.
QUOTAS = (0.2, 0.5, 1.0, 64.0)  # Processors.
STALL_SECONDS = 10.0
FREEZE_SECONDS = 5.0


class Disturbed:
    """`counts` says how often each kind of change was made."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        self.daemon = daemon.Daemon(model, folder, "--log-level", "debug", *flags)
        self.counts: Counter[str] = Counter()
        self._folder = folder
        self._reads = threading.Event()
        self._reads.set()

    @contextmanager
    def running(self, seconds: float) -> Iterator[None]:
        """Runs weftd, and changes something every `seconds`."""
        clock = ShiftedClock(self._folder)
        read, write = os.pipe()
        reader = threading.Thread(target=self._read, args=(read,))
        reader.start()
        ended = threading.Event()
        with quota.group() as group:
            launcher = group.launcher if group is not None else ()
            with os.fdopen(write, "wb") as pipe:
                self.daemon.start_with(*launcher, *clock.launcher, log=pipe)
            changes: dict[str, Callable[[], None]] = {
                "clock": lambda: clock.set(random.choice(CLOCKS)),
                "log": self._stall_log,
                "freeze": self._freeze,
            }
            if group is not None:
                changes["quota"] = lambda: group.limit(random.choice(QUOTAS))
            changer = threading.Thread(
                target=self._change, args=(changes, seconds, ended)
            )
            changer.start()
            try:
                yield
            finally:
                ended.set()
                changer.join()
                self._reads.set()
                code = self.daemon.stop()
                reader.join()
        assert code == 0, self.daemon.log_tail()

    def _change(
        self,
        changes: dict[str, Callable[[], None]],
        seconds: float,
        ended: threading.Event,
    ) -> None:
        while not ended.wait(seconds):
            name = random.choice(list(changes))
            self.counts[name] += 1
            changes[name]()

    def _read(self, descriptor: int) -> None:
        """Reads the log while it may, and keeps what it has read."""
        with (
            os.fdopen(descriptor, "rb") as pipe,
            self.daemon.log_path.open("wb") as log,
        ):
            while piece := pipe.read1(65536):
                log.write(piece)
                log.flush()
                self._reads.wait()

    def _stall_log(self) -> None:
        self._reads.clear()
        time.sleep(STALL_SECONDS)
        self._reads.set()

    def _freeze(self) -> None:
        os.kill(self.daemon.pid, signal.SIGSTOP)
        time.sleep(FREEZE_SECONDS)
        os.kill(self.daemon.pid, signal.SIGCONT)
