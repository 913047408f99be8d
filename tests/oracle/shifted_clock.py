"""A wall clock that a test sets for one process, through a preloaded library."""

from __future__ import annotations

import os
from pathlib import Path

import daemon

LIBRARY = daemon.BUILD_DIR / "tests" / "support" / "libweft_clock_shift.so"


class ShiftedClock:
    """`launcher` is the command that starts a program with this clock."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "shift"
        self.set(0)
        self.launcher = (
            "env",
            f"LD_PRELOAD={LIBRARY}",
            f"WEFT_CLOCK_SHIFT={self._file}",
        )

    def set(self, seconds: int) -> None:
        """Sets the clock to the machine's time plus `seconds`."""
        draft = self._file.with_suffix(".new")
        draft.write_text(str(seconds))
        os.replace(draft, self._file)
