"""Runs clang-tidy (.clang-tidy) on the product's sources, and caches clean results.

Sources that include LibTorch are left out, because they take ten times as long.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from checked_once import CheckedOnce, Part, parts
from compile_flags import compile_flags, includes_torch
from sources import ROOT

FOLDERS = ("src", "server", "client", "kernels/cpu")
CONFIG = ROOT / ".clang-tidy"

_NOT_COMPILED = re.compile(
    r"^(?:.*/)?((?:src|server|client|kernels)/\S+?):\d+:\d+: error: "
    r".*\[clang-diagnostic-error\]$",
    re.MULTILINE,
)


def tidy_parts() -> list[Part]:
    """Returns the sources that clang-tidy reads together, with their flags."""
    folders = tuple(f"{folder}/" for folder in FOLDERS)
    return parts(
        {
            name: flags
            for name, flags in compile_flags().items()
            if name.startswith(folders)
            and name.endswith(".cc")
            and not includes_torch(flags)
        }
    )


def _command(unit: Path, flags: list[str]) -> list[str]:
    options = ["--quiet", f"--config-file={CONFIG}"]
    return ["clang-tidy", *options, str(unit), "--", *flags]


def clang_tidy(cache: Path) -> CheckedOnce:
    """Returns clang-tidy with a cache."""
    version = subprocess.check_output(["clang-tidy", "--version"])
    return CheckedOnce(
        command=_command,
        not_compiled=_NOT_COMPILED,
        salt=version + CONFIG.read_bytes(),
        cache=cache,
    )
