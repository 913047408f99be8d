"""Starts the programs of the wheel that has the server: weftd and weftctl."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

BIN = Path(__file__).parent / "bin"


def _run(name: str) -> NoReturn:
    # The program has the same process, so signals and exit status are its own.
    os.execv(BIN / name, [name, *sys.argv[1:]])


def weftd() -> NoReturn:
    """Runs weftd with the LibTorch of this environment."""
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        os.environ.setdefault("WEFT_TORCH_DIR", str(Path(torch.origin).parent))
    _run("weftd")


def weftctl() -> NoReturn:
    """Runs weftctl."""
    _run("weftctl")
