"""The front's log: lines on stderr, for whose reader nobody waits."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time

MAX_WAITING = 1000  # Lines, or tracebacks, which have a few kB.
MAX_PER_SECOND = 20  # Strangers cause lines without a key.
FLUSH_SECONDS = 1.0
_STDERR = 2  # Not sys.stderr, for whose lock Python would wait at its end.


class Log(logging.Handler):
    """Writes records in a thread. Drops those beyond MAX_PER_SECOND in a second, and
    those beyond MAX_WAITING that wait for the reader of stderr. A later line says how
    many were dropped. Threads: any."""

    num_dropped = 0  # By all logs of the process.

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("weft openai: %(message)s"))
        self._lines: queue.Queue[str] = queue.Queue(MAX_WAITING)
        self._second = 0
        self._count = 0  # The records of this second.
        self._reported = Log.num_dropped
        # The process may end while this thread waits.
        threading.Thread(target=self._write, daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._count = second, 0
            self._report()
        self._count += 1
        if self._count > MAX_PER_SECOND or not self._put(self.format(record)):
            Log.num_dropped += 1

    def flush(self) -> None:
        """Waits until the lines are written, but FLUSH_SECONDS at most. Python calls it
        at its end."""
        self._report()
        done = self._lines.all_tasks_done
        with done:
            done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_SECONDS)

    def _report(self) -> None:
        dropped = Log.num_dropped
        count = dropped - self._reported
        if count and self._put(f"weft openai: {count} lines of the log were dropped"):
            self._reported = dropped

    def _put(self, line: str) -> bool:
        """Returns whether there was room for the line."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            return False
        return True

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            text = f"{line}\n".encode(errors="backslashreplace")
            while text:
                try:
                    text = text[os.write(_STDERR, text) :]
                except OSError:
                    break  # Nobody will read it.
            self._lines.task_done()
