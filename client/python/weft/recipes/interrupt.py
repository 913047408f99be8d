"""Lets a run finish and save its current step when the user presses Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2


class Interrupt:
    """Within this context the first SIGINT or SIGTERM only sets `asked`, so that the
    run can finish its step. The second signal raises KeyboardInterrupt.

    A step that is interrupted may leave a part of its gradient on the server. Outside
    of the main thread the context does nothing.
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
        # print is not safe here, because the signal may have interrupted a print.
        os.write(_STDERR, b"weft: this step is the last; once more: at once\n")
