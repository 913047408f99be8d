"""Holds the paths of src/README.md against the sources and against layers.txt.

A path is a table below a `###` heading whose first column is `file`. Its files
exist, and each row's modules are at most as high as those of the row above: a
request goes down and does not come back.
"""

import re
from pathlib import Path

from layering import read_layers

_FILE = re.compile(r"`([\w./-]+)`")


def _modules(layers: Path) -> list[str]:
    """All modules, the lowest first; kernels and proto know none of them."""
    return ["kernels", "proto", *read_layers(layers)]


def module_of(file: str) -> str:
    parts = file.split("/")
    return parts[1] if parts[0] == "src" else parts[0]


def paths(readme: str) -> dict[str, list[list[str]]]:
    """Heading to rows, each the files of its first column."""
    found: dict[str, list[list[str]]] = {}
    heading, in_table = "", False
    for line in readme.splitlines():
        if line.startswith("#"):
            heading, in_table = line.lstrip("# "), False
        elif line.startswith("| file |"):
            in_table = True
            found[heading] = []
        elif in_table and line.startswith("|") and not line.startswith("| ---"):
            found[heading].append(_FILE.findall(line.split("|")[1]))
        elif not line.startswith("|"):
            in_table = False
    return found


def offences(root: Path) -> list[str]:
    order = _modules(root / "src/layers.txt")
    messages = []
    for heading, rows in paths((root / "src/README.md").read_text()).items():
        above = len(order)
        for files in rows:
            for file in files:
                if not (root / file).is_file():
                    messages.append(f"{heading}: {file} does not exist")
            known = [module_of(f) for f in files if module_of(f) in order]
            levels = [order.index(module) for module in known]
            if not levels or max(levels) > above:
                messages.append(f"{heading}: {', '.join(files)} goes back up")
            else:
                above = min(levels)
    return messages
