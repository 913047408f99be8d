"""Builds the client's wheel, and environments that contain only the wheel and what
it requires.

Nothing is downloaded. The required packages are linked from this environment by the
names in the wheel's metadata. So a package that the wheel forgets to require is
missing.
"""

from __future__ import annotations

import email
import importlib.metadata
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

CLIENT = Path(__file__).resolve().parents[2] / "client" / "python"


def run(*command: object, cwd: Path | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Builds the wheel like `python -m build`, by way of the sdist, with the
    installed build packages."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder]
    run(*command, CLIENT)
    (made,) = folder.glob("*.whl")
    return made


def install(wheel: Path, folder: Path, extra: str | None = None) -> Path:
    """Returns the Python of a new environment that has the wheel and what it
    requires."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    for requirement in _required(wheel, extra):
        _lend(requirement, packages)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    asked = f"{wheel}[{extra}]" if extra else wheel
    run(*pip, "install", "--no-index", "--quiet", asked)
    return python


def requirements(wheel: Path, extra: str | None) -> list[str]:
    """Returns the names that the wheel requires, with or without one of its extras."""
    return [requirement.name for requirement in _required(wheel, extra)]


def _required(wheel: Path, extra: str | None) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    asked = metadata.get_all("Requires-Dist") or []
    return list(_needed(asked, {extra or ""}))


def _needed(requirements: Iterable[str], extras: set[str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in extras):
            yield requirement


def _lend(requirement: Requirement, packages: Path) -> None:
    """Links a distribution of this environment, and what it needs, into another
    environment."""
    found = importlib.metadata.distribution(requirement.name)
    for file in found.files or ():
        top = file.parts[0]
        target = packages / top
        if top in ("..", "__pycache__") or target.exists():
            continue
        target.symlink_to(Path(str(found.locate_file(top))))
    for needed in _needed(found.requires or (), {"", *requirement.extras}):
        _lend(needed, packages)
