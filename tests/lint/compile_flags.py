"""Returns how each source is compiled, for tools that read sources like the
compiler."""

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from sources import ROOT

# Preset dev, which compiles each source alone. It is only configured.
DATABASE = ROOT / "build" / "dev" / "compile_commands.json"
BUILD = Path(os.environ.get("WEFT_BUILD_DIR", ROOT / "build" / "cpu"))
TORCH = "-idirafter"
_KEPT = re.compile(r"-(I|D|m|std=|idirafter)")


def _kept(command: str) -> Iterator[str]:
    words = iter(shlex.split(command))
    for word in words:
        if word == "-isystem":
            yield from (word, next(words))
        elif _KEPT.match(word):
            yield word


def compile_flags() -> dict[str, list[str]]:
    """Maps each source of DATABASE to the flags that determine how it is read. Flags
    for warnings and precompiled headers are left out. Generated headers are those of
    the folder BUILD, in which all targets are built.

    Names of sources and folders in flags are relative to the root, so a tool must run
    in the root. Generated sources are left out.
    """
    found = {}
    for entry in json.loads(DATABASE.read_text()):
        path = Path(entry["file"])
        if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "build"):
            command = entry["command"].replace(str(DATABASE.parent), str(BUILD))
            command = command.replace(f"{ROOT}/", "")
            command = command.replace(f"-I{ROOT} ", "-I. ")
            found[str(path.relative_to(ROOT))] = [*_kept(command)]
    return found


def includes_torch(flags: list[str]) -> bool:
    return any(flag.startswith(TORCH) for flag in flags)
