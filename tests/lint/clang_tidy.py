"""Runs clang-tidy (.clang-tidy) on the product's sources, once for each content.

Nearly all of clang-tidy's time goes to headers. So the sources of a folder with the
same flags are read together, which takes a fifth of the time. A source whose
unnamed namespace clashes with an earlier source is read separately.

A clean result is cached in a folder beside ccache's, as an empty file named by a
hash of the preprocessed text, the flags, the configuration and the version. Sources
that include LibTorch are left out, because they take ten times as long.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from compile_flags import compile_flags, includes_torch
from sources import ROOT

FOLDERS = ("src", "server", "client", "kernels/cpu")
Part = tuple[list[str], list[str]]  # Flags and sources.

_ERROR = re.compile(
    r"^(?:.*/)?((?:src|server|client|kernels)/\S+?):\d+:\d+: error: "
    r".*\[clang-diagnostic-error\]$",
    re.MULTILINE,
)


def cache_folder() -> Path:
    ccache = os.environ.get("CCACHE_DIR", "~/.cache/ccache")
    return Path(ccache).expanduser().parent / "weft-clang-tidy"


def parts(database: Path, root: Path = ROOT) -> list[Part]:
    """Returns flags, and the sources below root that are read together with them."""
    found = defaultdict(list)
    for name, flags in sorted(compile_flags(database, root).items()):
        ours = name.startswith(tuple(f"{folder}/" for folder in FOLDERS))
        if ours and name.endswith(".cc") and not includes_torch(flags):
            found[Path(name).parent, tuple(flags)].append(name)
    return [(list(flags), names) for (_, flags), names in found.items()]


def _not_compiled(found: str) -> set[str]:
    return set(_ERROR.findall(found))


@dataclass
class Tidy:
    """clang-tidy with a cache. Threads: any."""

    cache: Path
    root: Path = ROOT
    config: Path = ROOT / ".clang-tidy"
    runs: list[list[str]] = field(default_factory=list)  # The sources of each run.

    def __post_init__(self) -> None:
        self.cache.mkdir(parents=True, exist_ok=True)
        version = subprocess.check_output(["clang-tidy", "--version"])
        self._salt = version + self.config.read_bytes()

    def check(self, sources: list[str], flags: list[str]) -> str:
        """Returns clang-tidy's messages about the sources; empty if there are none."""
        with tempfile.TemporaryDirectory() as folder:
            unit = Path(folder) / "together.cc"
            unit.write_text("".join(f'#include "{name}"\n' for name in sources))
            key = self.cache / self._key(unit, flags)
            if key.exists():
                return ""
            found = self._run(unit, sources, flags)
        clashing = [name for name in sources if name in _not_compiled(found)]
        apart = [name for name in sources if name not in clashing]
        if clashing and apart:
            found = self.check(apart, flags) + self.check(clashing, flags)
        if not found:
            key.touch()
        return found

    def check_all(self, parts: list[Part]) -> str:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            # The largest parts start first.
            ordered = sorted(parts, key=lambda part: -len(part[1]))
            return "".join(pool.map(lambda part: self.check(part[1], part[0]), ordered))

    def _key(self, unit: Path, flags: list[str]) -> str:
        # The text includes comments, because they may silence a check.
        command = ["clang++", *flags, "-E", "-C", str(unit)]
        text = subprocess.run(command, cwd=self.root, capture_output=True).stdout
        text = text.replace(str(unit).encode(), b"")
        return hashlib.sha256(self._salt + repr(flags).encode() + text).hexdigest()

    def _run(self, unit: Path, sources: list[str], flags: list[str]) -> str:
        self.runs.append(sources)
        done = subprocess.run(
            ["clang-tidy", "--quiet", f"--config-file={self.config}", str(unit)]
            + ["--", *flags],
            cwd=self.root,
            capture_output=True,
            text=True,
        )
        return done.stdout if done.returncode != 0 else ""
