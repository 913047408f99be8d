"""Runs a checker that reads sources as a compiler does, and caches clean results.

Nearly all of such a checker's time goes to headers. So the sources of a folder with
the same flags are read together, which takes a fifth of the time. A source whose
unnamed namespace clashes with an earlier source is read separately.

A clean result is cached in a folder beside ccache's, as an empty file named by a
hash of the preprocessed text, the flags and the checker. Preprocessing takes a third
of the time of a checker, so the names and hashes of the files that were read are kept,
too. If all are unchanged, so is the text. Like ccache, this does not see a new file
that would be found in place of an old one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sources import ROOT

Part = tuple[list[str], list[str]]  # Flags and sources.


def cache_folder(checker: str) -> Path:
    ccache = os.environ.get("CCACHE_DIR", "~/.cache/ccache")
    return Path(ccache).expanduser().parent / f"weft-{checker}"


def parts(flags_of: dict[str, list[str]]) -> list[Part]:
    """Groups sources by folder and flags. Returns each group's flags and sources."""
    found = defaultdict(list)
    for name, flags in sorted(flags_of.items()):
        found[Path(name).parent, tuple(flags)].append(name)
    return [(list(flags), names) for (_, flags), names in found.items()]


@functools.cache
def _digest(path: Path, modified_ns: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class CheckedOnce:
    """A checker with a cache. Threads: any.

    command: the checker's command line for one file with these flags.
    not_compiled: matches the messages about a source that does not compile, with the
    source's path below the root as its first group.
    salt: identifies the checker, with its version and configuration.
    """

    command: Callable[[Path, list[str]], list[str]]
    not_compiled: re.Pattern[str]
    salt: bytes
    cache: Path

    def __post_init__(self) -> None:
        self.cache.mkdir(parents=True, exist_ok=True)

    def check(self, sources: list[str], flags: list[str]) -> str:
        """Returns the messages about the sources; empty if there are none."""
        last_time = self.cache / f"{self._hash(repr((sources, flags)).encode())}.json"
        if self._unchanged(last_time):
            return ""
        with tempfile.TemporaryDirectory() as folder:
            unit = Path(folder) / "together.cc"
            unit.write_text("".join(f'#include "{name}"\n' for name in sources))
            key, digests = self._key(unit, flags)
            found = "" if key.exists() else self._run(unit, flags)
        failed = set(self.not_compiled.findall(found))
        clashing = [name for name in sources if name in failed]
        apart = [name for name in sources if name not in clashing]
        if clashing and apart:
            found = self.check(apart, flags) + self.check(clashing, flags)
        if not found:
            key.touch()
        if not found and digests:
            with tempfile.NamedTemporaryFile("w", dir=self.cache, delete=False) as new:
                json.dump(digests, new)
            os.replace(new.name, last_time)
        return found

    def check_all(self, parts: list[Part]) -> str:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            # The largest parts start first.
            ordered = sorted(parts, key=lambda part: -len(part[1]))
            return "".join(pool.map(lambda part: self.check(part[1], part[0]), ordered))

    def _hash(self, content: bytes) -> str:
        return hashlib.sha256(self.salt + content).hexdigest()

    def _digest(self, name: str) -> str:
        """Returns the hash of a file, or nothing if there is no such file."""
        path = ROOT / name
        if not path.is_file():
            return ""
        stat = path.stat()
        return _digest(path, stat.st_mtime_ns, stat.st_size)

    def _unchanged(self, last_time: Path) -> bool:
        try:
            digests = json.loads(last_time.read_text())
        except (FileNotFoundError, ValueError):
            return False
        return all(self._digest(name) == digest for name, digest in digests.items())

    def _key(self, unit: Path, flags: list[str]) -> tuple[Path, dict[str, str]]:
        """Returns the file of a clean result, and the hashes of the files that the
        unit reads; no hashes if a file may not have been read as it is now."""
        began = time.time_ns()
        # The text includes comments, because they may silence a check.
        depfile = unit.with_suffix(".d")
        command = ["clang++", *flags, "-E", "-C", "-MD", "-MF", str(depfile), str(unit)]
        text = subprocess.run(command, cwd=ROOT, capture_output=True).stdout
        text = text.replace(str(unit).encode(), b"")
        key = self.cache / self._hash(repr(flags).encode() + text)
        # A source that cannot be preprocessed has no list of files.
        read = depfile.read_text() if depfile.exists() else ""
        names = set(read.replace("\\\n", " ").split()[2:])
        digests = {name: self._digest(name) for name in sorted(names)}
        paths = [ROOT / name for name in names]
        if not all(digests.values()) or any(
            path.stat().st_mtime_ns >= began for path in paths
        ):
            return key, {}
        return key, digests

    def _run(self, unit: Path, flags: list[str]) -> str:
        done = subprocess.run(
            self.command(unit, flags), cwd=ROOT, capture_output=True, text=True
        )
        return done.stdout + done.stderr if done.returncode != 0 else ""
