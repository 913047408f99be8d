"""Checks #include lines against src/layers.txt.

A module of src/ or of server/ may include itself, base, and what its row names. A row
may name only modules that are above the row and that its own module includes. Only
modules whose rows are marked (torch) may include Torch's headers. TORCH_FREE_FILES in
marked modules may not, because modules without Torch include these files. kernels/ may
not include Torch, Abseil or our modules.
"""

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sources import CPP_SUFFIXES, files, includes

TORCH_FREE_FILES = (
    "*_config.*",
    "weight_list.*",
    "checkpoint_report.*",
    "adapter_layout.*",
    "model_shard.*",
    "shard.h",
    "peft_format.*",
    "engine.h",
)
_ROW = re.compile(r"^([\w/]+)(\(torch(?:=(?P<files>\S+))?\))?:\s*(.*)$")
_TORCH = re.compile(r"^(ATen|c10|torch)/")
# A file, or `file:function`.
_NAMED_FILE = re.compile(r"`([\w./-]+/[\w.-]+\.(?:h|cc|cu|cuh|txt|proto))(?::(\w+))?`")
_OTHER_FOLDERS = ("server", "client")


class Layer(NamedTuple):
    line: int
    allowed: tuple[str, ...]
    torch: str | None  # Pattern of the files that may use Torch.


def read_layers(path: Path) -> dict[str, Layer]:
    """Reads the rows of layers.txt. Raises ValueError if a line is not a row, or names
    a module that is not above it."""
    layers: dict[str, Layer] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _ROW.match(line)
        if not match:
            raise ValueError(f"{path.name}:{number}: not a row: {line}")
        name, torch, rest = match.group(1, 2, 4)
        for allowed in rest.split():
            above = allowed in layers or allowed.split("/")[0] in layers
            if not above and allowed not in ("kernels", "proto"):
                raise ValueError(f"{path.name}:{number}: {allowed} is not above")
        pattern = (match["files"] or "*") if torch else None
        layers[name] = Layer(number, tuple(rest.split()), pattern)
    return layers


def _is_torch_free(path: Path, layer: Layer) -> bool:
    if layer.torch is None or not fnmatch.fnmatch(path.name, layer.torch):
        return True
    return any(fnmatch.fnmatch(path.name, p) for p in TORCH_FREE_FILES)


def _target(include: str) -> tuple[str, str] | None:
    """Returns (module, file in it) for an include of the project, None for others."""
    head, _, rest = include.partition("/")
    if head == "src":
        module, _, rest = rest.partition("/")
        return module, rest
    if include.startswith("weft/v1/"):
        return "proto", rest
    if head == "server" and "/" in rest:
        part, _, rest = rest.partition("/")
        return f"server/{part}", rest
    if head in (*_OTHER_FOLDERS, "kernels"):
        return head, rest
    return None


def _reaches_torch(root: Path, include: str, seen: set[str]) -> bool:
    if _TORCH.match(include):
        return True
    if include in seen or not include.startswith(("src/", "server/", "client/")):
        return False
    seen.add(include)
    path = root / include
    return path.is_file() and any(
        _reaches_torch(root, i.path, seen) for i in includes(path)
    )


def _offences_of_file(root: Path, path: Path, module: str, layer: Layer) -> list[str]:
    found = []
    torch_free = _is_torch_free(path, layer)
    for line, include in includes(path):
        place = f"{path.relative_to(root)}:{line}: {include}"
        if torch_free and _reaches_torch(root, include, set()):
            found.append(f"{place}: this file must stay free of Torch")
            continue
        target = _target(include)
        if target is None or target[0] in (module, "base"):
            continue
        if target[0] in layer.allowed or "/".join(target) in layer.allowed:
            continue
        found.append(f"{place}: {module} may include base {' '.join(layer.allowed)}")
    return found


def _kernel_offences(root: Path) -> list[str]:
    found = []
    for path in files(root, ("kernels",), CPP_SUFFIXES):
        for line, include in includes(path):
            ours = _target(include)
            foreign = _TORCH.match(include) or include.startswith("absl/")
            if foreign or (ours and ours[0] != "kernels"):
                place = f"{path.relative_to(root)}:{line}: {include}"
                found.append(f"{place}: kernels know neither Torch, Abseil nor us")
    return found


def _files_of_modules(root: Path) -> Iterator[tuple[str, Path]]:
    for path in files(root, ("src", *_OTHER_FOLDERS), CPP_SUFFIXES):
        if path.parent == root / "src":
            continue  # The precompiled header belongs to no module.
        target = _target(str(path.relative_to(root)))
        assert target is not None
        yield target[0], path


def layering_offences(root: Path) -> list[str]:
    """Returns one `file:line: include: reason` for each include that breaks the
    rules."""
    layers = read_layers(root / "src" / "layers.txt")
    found = _kernel_offences(root)
    for module, path in _files_of_modules(root):
        if module not in layers:
            found.append(f"{path.relative_to(root)}:1: no row in src/layers.txt")
            continue
        found.extend(_offences_of_file(root, path, module, layers[module]))
    return found


def unused_permissions(root: Path) -> list[str]:
    """Returns one `src/layers.txt:line: reason` for each permission that no file
    needs."""
    layers = read_layers(root / "src" / "layers.txt")
    unused = {
        (name, permission)
        for name, layer in layers.items()
        for permission in (*layer.allowed, *(["torch"] if layer.torch else []))
    }
    for module, path in _files_of_modules(root):
        torch_free = module not in layers or _is_torch_free(path, layers[module])
        for _, include in includes(path):
            target = _target(include)
            if target is not None:
                unused -= {(module, target[0]), (module, "/".join(target))}
            if not torch_free and _reaches_torch(root, include, set()):
                unused.discard((module, "torch"))
    return [
        f"src/layers.txt:{layers[name].line}: {name} does not need {permission}"
        for name, permission in sorted(unused)
    ]


def missing_paths(root: Path) -> list[str]:
    """Returns the files that src/README.md names and that do not exist, and the
    functions that do not occur in their files."""
    readme = root / "src" / "README.md"
    if not readme.exists():
        return []
    found = []
    for number, line in enumerate(readme.read_text().splitlines(), start=1):
        for name, function in _NAMED_FILE.findall(line):
            file = root / name
            if not file.exists():
                found.append(f"src/README.md:{number}: {name} does not exist")
            elif function and not re.search(rf"\b{function}\b", file.read_text()):
                found.append(f"src/README.md:{number}: {name} has no {function}")
    return found
