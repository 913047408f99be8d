"""Checks includes, namespaces and test folders against src/layers.txt.

A row is a module of src/, server/ or client/, a room (a folder inside a module), or one
header of a module. It may include itself, base and base's rooms, and what it names. A
row may name only rows that are above it and that it includes. Only rows that are marked
(torch) may include Torch's headers. TORCH_FREE_FILES in marked rows may not, because
rows without Torch include these files. kernels/ may not include Torch, Abseil or our
modules.

A file's namespace is that of its module, or is inside it: files of server/tinker are in
weft::server::tinker. The words of base and request are those of all modules, and stand
in weft itself.

A folder of tests has the name of a folder of the product, or is in OTHER_TESTS.
"""

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path, PurePath
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
_ROW = re.compile(r"^([\w/.]+)(\(torch(?:=(?P<files>\S+))?\))?:\s*(.*)$")
_TORCH = re.compile(r"^(ATen|c10|torch)/")
# A file, or `file:function`.
_NAMED_FILE = re.compile(r"`([\w./-]+/[\w.-]+\.(?:h|cc|cu|cuh|txt|proto))(?::(\w+))?`")
_OTHER_FOLDERS = ("server", "client")
_ROOT_NAMESPACE = ("base", "request")
_NAMESPACE = re.compile(r"^namespace (weft(?:::\w+)*) \{", re.M)
OTHER_TESTS = ("lint", "oracle", "support")


class Layer(NamedTuple):
    line: int
    allowed: tuple[str, ...]
    torch: str | None  # Pattern of the files that may use Torch.


def _rows(text: str) -> list[tuple[int, str]]:
    """Returns each row with the number of its first line."""
    rows: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("  "):
            rows[-1] = (rows[-1][0], rows[-1][1] + line)
        elif line.strip() and not line.startswith("#"):
            rows.append((number, line))
    return rows


def read_layers(path: Path) -> dict[str, Layer]:
    """Reads the rows of layers.txt. Raises ValueError if a line is not a row, or names
    a module that is not above it."""
    layers: dict[str, Layer] = {}
    for number, line in _rows(path.read_text()):
        match = _ROW.match(line)
        if not match:
            raise ValueError(f"{path.name}:{number}: not a row: {line}")
        name, torch, rest = match.group(1, 2, 4)
        for allowed in rest.split():
            if allowed not in (*layers, "kernels", "proto"):
                raise ValueError(f"{path.name}:{number}: {allowed} is not above")
        pattern = (match["files"] or "*") if torch else None
        layers[name] = Layer(number, tuple(rest.split()), pattern)
    return layers


def _is_torch_free(path: Path, layer: Layer) -> bool:
    if layer.torch is None or not fnmatch.fnmatch(path.name, layer.torch):
        return True
    return any(fnmatch.fnmatch(path.name, p) for p in TORCH_FREE_FILES)


def _row_of(file: str, layers: dict[str, Layer]) -> str:
    """Returns the row of `file`, a path without src/: the file itself, else the nearest
    folder that has a row, else the file's folder."""
    candidates = [file, *(str(p) for p in PurePath(file).parents)]
    return next((c for c in candidates if c in layers), candidates[1])


def _target(include: str, layers: dict[str, Layer]) -> str | None:
    """Returns the row of an include of the project, None for others."""
    if include.startswith("weft/v1/"):
        return "proto"
    head, _, rest = include.partition("/")
    if head == "kernels":
        return head
    if head == "src":
        return _row_of(rest, layers)
    return _row_of(include, layers) if head in _OTHER_FOLDERS else None


def _is_allowed(module: str, target: str, layer: Layer) -> bool:
    if target == module or target in layer.allowed:
        return True
    return target.split("/")[0] == "base" != module.split("/")[0]


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


def _offences_of_file(
    root: Path, path: Path, module: str, layers: dict[str, Layer]
) -> list[str]:
    found = []
    layer = layers[module]
    torch_free = _is_torch_free(path, layer)
    for line, include in includes(path):
        place = f"{path.relative_to(root)}:{line}: {include}"
        if torch_free and _reaches_torch(root, include, set()):
            found.append(f"{place}: this file must stay free of Torch")
            continue
        target = _target(include, layers)
        if target is not None and not _is_allowed(module, target, layer):
            found.append(
                f"{place}: {module} may include base {' '.join(layer.allowed)}"
            )
    return found


def _kernel_offences(root: Path) -> list[str]:
    found = []
    for path in files(root, ("kernels",), CPP_SUFFIXES):
        for line, include in includes(path):
            foreign = _TORCH.match(include) or include.startswith("absl/")
            if foreign or _target(include, {}) not in (None, "kernels"):
                place = f"{path.relative_to(root)}:{line}: {include}"
                found.append(f"{place}: kernels know neither Torch, Abseil nor us")
    return found


def _files_of_modules(
    root: Path, layers: dict[str, Layer]
) -> Iterator[tuple[str, Path]]:
    for path in files(root, ("src", *_OTHER_FOLDERS), CPP_SUFFIXES):
        if path.parent == root / "src":
            continue  # The precompiled header belongs to no module.
        target = _target(str(path.relative_to(root)), layers)
        assert target is not None
        yield target, path


def layering_offences(root: Path) -> list[str]:
    """Returns one `file:line: include: reason` for each include that breaks the
    rules."""
    layers = read_layers(root / "src" / "layers.txt")
    found = _kernel_offences(root)
    for module, path in _files_of_modules(root, layers):
        if _needs_row(root, path, module, layers):
            found.append(f"{path.relative_to(root)}:1: no row in src/layers.txt")
            continue
        found.extend(_offences_of_file(root, path, module, layers))
    return found


def _needs_row(root: Path, path: Path, module: str, layers: dict[str, Layer]) -> bool:
    """A folder has a row of its own."""
    folder = str(path.parent.relative_to(root)).removeprefix("src/")
    return module not in layers or (folder not in layers and module != folder)


def unused_permissions(root: Path) -> list[str]:
    """Returns one `src/layers.txt:line: reason` for each permission that no file
    needs."""
    layers = read_layers(root / "src" / "layers.txt")
    unused = {
        (name, permission)
        for name, layer in layers.items()
        for permission in (*layer.allowed, *(["torch"] if layer.torch else []))
    }
    for module, path in _files_of_modules(root, layers):
        torch_free = module not in layers or _is_torch_free(path, layers[module])
        for _, include in includes(path):
            target = _target(include, layers)
            if target is not None:
                unused.discard((module, target))
            if not torch_free and _reaches_torch(root, include, set()):
                unused.discard((module, "torch"))
    return [
        f"src/layers.txt:{layers[name].line}: {name} does not need {permission}"
        for name, permission in sorted(unused)
    ]


def namespace_offences(root: Path) -> list[str]:
    """Returns one `file:line: namespace: reason` for each namespace that is not the
    file's module or room."""
    found = []
    for path in files(root, ("src", *_OTHER_FOLDERS, "kernels"), CPP_SUFFIXES):
        relative = path.relative_to(root)
        folders = relative.parent.parts[relative.parts[0] == "src" :]
        if not folders:
            continue  # The precompiled header belongs to no module.
        text = path.read_text()
        for match in _NAMESPACE.finditer(text):
            if _fits(match[1], path, folders) or _only_declares(text, match):
                continue
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{relative}:{line}: {match[1]} is not {'/'.join(folders)}")
    return found


def _fits(namespace: str, path: Path, folders: tuple[str, ...]) -> bool:
    if folders[0] in _ROOT_NAMESPACE:
        return namespace in ("weft", f"weft::{path.stem}")
    return f"{namespace}::".startswith(f"weft::{folders[0]}::")


def _only_declares(text: str, match: re.Match[str]) -> bool:
    """Tells whether the namespace only declares types that another module defines, or
    only gives names to its own."""
    body = text[match.end() : text.find("\n}", match.end())]
    lines = (x for x in body.splitlines() if x and not x.startswith("//"))
    return all(re.fullmatch(r"(?:class|struct|using) [\w:]+;", x) for x in lines)


def folder_offences(root: Path) -> list[str]:
    """Returns the folders of tests/ that mirror no folder of the product."""
    found = []
    for path in sorted((root / "tests").glob("**/*_test.cc")):
        folder = path.parent.relative_to(root / "tests")
        if folder.parts[0] in OTHER_TESTS:
            continue
        if not any((root / top / folder).is_dir() for top in ("src", ".")):
            found.append(f"tests/{folder}: neither src/{folder} nor {folder} exists")
    return sorted(set(found))


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
