"""Ctrl-C during a run: the step that is under way ends, and is saved."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2


class Interrupt:
    """The first SIGINT or SIGTERM only sets `asked`; the second raises.

    A step that is cut leaves a part of its gradient on the server. As a context
    manager; on another thread than the main one it does nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        # Not print: the signal may have come within one.
        os.write(_STDERR, b"weft: this step is the last; once more: at once\n")
