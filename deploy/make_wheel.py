#!/usr/bin/env python3
"""Makes a wheel of the server and the client, for those who do not compile.

    .venv/bin/python deploy/make_wheel.py --build build/cpu --out dist
    pip install dist/weftd-*.whl && weftd --model DIR

The wheel is the client's wheel with the tree of `cmake --install` in `weft/server`. It
requires the version of torch with which the build was linked. pip's own index has it
with CUDA, which takes gigabytes; for a machine without a GPU install it from PyTorch's
index of CPU wheels before.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Debian 12, on which weftd is built, has glibc 2.36.
TAG = "py3-none-manylinux_2_36_x86_64"
SETUPTOOLS = 77  # The least version, as client/python/pyproject.toml has it.
PROGRAMS = "weftctl = weft.server:weftctl\nweftd = weft.server:weftd\n"


def torch_version() -> str:
    """Returns the version of torch that deploy/setup.sh installs."""
    pinned = (ROOT / "deploy" / "constraints.txt").read_text()
    found = re.search(r"^torch==(\S+)", pinned, re.MULTILINE)
    assert found is not None
    return found[1]


def check_python() -> None:
    """Ends the program if this Python lacks what builds the client's wheel."""
    try:
        if int(metadata.version("setuptools").partition(".")[0]) >= SETUPTOOLS:
            metadata.version("grpcio-tools")
            return
    except metadata.PackageNotFoundError:
        pass
    sys.exit(
        f"{sys.executable} lacks setuptools {SETUPTOOLS} or grpcio-tools: use the "
        "Python of deploy/setup.sh, .venv/bin/python"
    )


def client_files(folder: Path) -> dict[str, bytes]:
    """Builds the client's wheel in the folder, and returns its files by name."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    source = ROOT / "client" / "python"
    subprocess.run(
        [*pip, "--no-build-isolation", "--wheel-dir", folder, source], check=True
    )
    (wheel,) = folder.glob("weftd-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def server_files(build: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Installs the build in the folder, and yields the wheel's names of its files."""
    install: list[str | Path] = ["cmake", "--install", build, "--strip"]
    install += ["--prefix", folder]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    for path in sorted([*folder.glob("bin/*"), *folder.glob("lib/weft/*")]):
        # A wheel has no links. A library is opened by the name of its link.
        if path.is_file() and (path.is_symlink() or not _linked(path)):
            yield f"weft/server/{path.relative_to(folder)}", path


def _linked(path: Path) -> bool:
    """Returns whether a link in the same folder leads to the file."""
    return any(
        other.is_symlink() and other.resolve() == path.resolve()
        for other in path.parent.iterdir()
    )


def change_metadata(files: dict[str, bytes], info: str) -> None:
    """Changes the client's metadata to that of the wheel with the server."""
    lines = files[f"{info}/METADATA"].decode().split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith("Requires-Dist:"))
    lines.insert(at, f"Requires-Dist: torch=={torch_version()}")
    files[f"{info}/METADATA"] = "\n".join(lines).encode()
    wheel = re.sub(r"(?m)^Tag: .*$", f"Tag: {TAG}", files[f"{info}/WHEEL"].decode())
    files[f"{info}/WHEEL"] = wheel.replace("Is-Pure: true", "Is-Pure: false").encode()
    files[f"{info}/entry_points.txt"] += PROGRAMS.encode()
    del files[f"{info}/RECORD"]


def make(build: Path, out: Path) -> Path:
    """Writes the wheel into a folder, and returns its path."""
    with tempfile.TemporaryDirectory() as scratch:
        files = client_files(Path(scratch) / "client")
        info = next(name for name in files if name.endswith("/METADATA")).split("/")[0]
        change_metadata(files, info)
        files["weft/server/__init__.py"] = (
            ROOT / "deploy/wheel/server.py"
        ).read_bytes()
        programs = set()
        for name, path in server_files(build, Path(scratch) / "server"):
            files[name] = path.read_bytes()
            programs.add(name)
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{info.removesuffix('.dist-info')}-{TAG}.whl"
        _write(path, files, info, programs)
    return path


def _write(path: Path, files: dict[str, bytes], info: str, programs: set[str]) -> None:
    record = ""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
            record += f"{name},sha256={digest.decode().rstrip('=')},{len(content)}\n"
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name in programs else 0o100644) << 16
            archive.writestr(entry, content)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    check_python()
    path = make(options.build, options.out)
    print(f"{path}: {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
