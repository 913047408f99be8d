"""Finds calls of device hooks that LibTorch's class for CUDA does not override.

at::detail::getCUDAHooks() returns an interface whose own functions are inline and
throw. So a call of a function that CUDA's class does not override compiles and links,
but fails on a machine that has a device.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from sources import CPP_SUFFIXES, files

FOLDERS = ("src", "server", "tests")
# The header of CUDA's class, below LibTorch's include folder.
HEADER = Path("ATen") / "cuda" / "detail" / "CUDAHooks.h"

_CALL = re.compile(r"getCUDAHooks\(\)\s*\.\s*(\w+)\s*\(")
_OVERRIDE = re.compile(r"\b(\w+)\s*\([^;{]*\)\s*const\s+override")


def answered(header: str) -> frozenset[str]:
    """Returns the names of the hooks that the class overrides."""
    return frozenset(_OVERRIDE.findall(header))


def hook_calls(text: str) -> Iterator[tuple[int, str]]:
    """Yields line and name of each hook that a C++ source calls."""
    for match in _CALL.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match.group(1)


def hook_offences(root: Path, header: str) -> list[str]:
    """Returns one `file:line: reason` for each call of a hook that CUDA lacks."""
    known = answered(header)
    return [
        f"{path.relative_to(root)}:{line}: CUDA has no {name}: it throws"
        for path in files(root, FOLDERS, CPP_SUFFIXES)
        for line, name in hook_calls(path.read_text())
        if name not in known
    ]
