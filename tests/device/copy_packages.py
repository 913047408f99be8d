"""Copies installed packages, with their version metadata, into a folder:
copy_packages.py FOLDER NAME..."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        for file in distribution(name).files or ():
            if ".." in file.parts or "__pycache__" in file.parts:
                continue  # Skips scripts, and bytecode, which Python compiles again.
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), target)


if __name__ == "__main__":
    main()
