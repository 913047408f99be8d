"""Checks the paths of src/README.md against the sources and layers.txt.

A path is a table below a `###` heading. Its first column is `file`. The files must
exist, and each row's modules are at most as high as those of the row above, because
a request goes down and does not come back. The document names every source of the
modules in CROSSED, so that a new file is listed where a reader looks for it.
"""

import re
from pathlib import Path

from layering import read_layers

# The modules that the paths cross. Paths also enter other modules, such as
# src/files and src/weights, but name only the source that is called first.
CROSSED = (
    "adapters",
    "decode",
    "dispatch",
    "engine",
    "executor",
    "journal",
    "kv",
    "lora",
    "loss",
    "model",
    "ops",
    "optim",
    "peft",
    "records",
    "sampling",
    "sched",
    "train",
)
_FILE = re.compile(r"`([\w./-]+)`")


def _modules(layers: Path) -> list[str]:
    """Returns all modules, the lowest first. kernels and proto use none of the
    others."""
    return ["kernels", "proto", *read_layers(layers)]


def module_of(file: str) -> str:
    parts = file.split("/")
    return parts[1] if parts[0] == "src" else parts[0]


def paths(readme: str) -> dict[str, list[list[str]]]:
    """Maps a heading to its rows. A row is the list of files in the first column."""
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


def unnamed(root: Path, readme: str) -> list[str]:
    """Returns the sources of CROSSED that the document names neither as .cc nor as
    .h."""
    named = {Path(file).stem for file in _FILE.findall(readme)}
    return [
        f"{source.relative_to(root)} is not in src/README.md"
        for module in CROSSED
        for source in sorted((root / "src" / module).glob("*.cc"))
        if source.stem not in named
    ]


def offences(root: Path) -> list[str]:
    order = _modules(root / "src/layers.txt")
    readme = (root / "src/README.md").read_text()
    messages = unnamed(root, readme)
    for heading, rows in paths(readme).items():
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
