"""Control groups that limit the processor time of a process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Version 1 or 2 of the kernel's control groups.
FOLDERS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
FILES = ("cpu.cfs_quota_us", "cpu.max")
PERIOD = 100_000  # Microseconds.
NUMBERS = itertools.count()


class Group:
    """`launcher` is the command that starts a program in this group."""

    def __init__(self, folder: Path) -> None:
        (self._file,) = [folder / name for name in FILES if (folder / name).exists()]
        join = f'echo $$ > {folder}/cgroup.procs; exec "$@"'
        self.launcher = ("sh", "-c", join, "sh")

    def limit(self, processors: float) -> None:
        """Gives the group's processes together this many processors."""
        microseconds = str(round(processors * PERIOD))
        if self._file.name == "cpu.max":
            microseconds += f" {PERIOD}"
        self._file.write_text(microseconds)


@contextmanager
def group() -> Iterator[Group | None]:
    """Makes a group, whose processes must have ended at the end. Yields None if this
    process may not make groups."""
    for parent in FOLDERS:
        folder = parent / f"weft-bench-{os.getpid()}-{next(NUMBERS)}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if any((folder / name).exists() for name in FILES):
                yield Group(folder)
                return
        finally:
            folder.rmdir()
    yield None
