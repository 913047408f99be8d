"""Every public header stands alone.

Preset asan compiles each header of the modules without LibTorch and gRPC by itself.
The headers of the other modules, of the server and of the clients are compiled here,
each without precompiled headers, through ccache: two minutes of CPU time from nothing,
seconds with a warm cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deploy_files import ROOT

sys.path.insert(0, str(ROOT / "tests" / "lint"))
from compile_flags import compile_flags, includes_torch

pytestmark = pytest.mark.skipif(
    shutil.which("clang++") is None, reason="no clang++ on this machine"
)


BUILD = Path(os.environ.get("WEFT_BUILD_DIR", ROOT / "build" / "cpu"))
_CCACHE = [found] if (found := shutil.which("ccache")) else []


def _headers() -> dict[Path, list[str]]:
    """Headers that are compiled here, with the flags of a source beside them."""
    found: dict[Path, list[str]] = {}
    for name, flags in sorted(compile_flags(BUILD / "compile_commands.json").items()):
        folder = name.split("/")[0]
        torch = folder == "src" and includes_torch(flags)
        if torch or folder in ("server", "client"):
            for header in (ROOT / name).parent.glob("*.h"):
                found.setdefault(header, flags)
    return found


def _errors(header: Path, flags: list[str], folder: Path) -> str:
    """What the compiler says of a source that includes only this header."""
    name = os.path.relpath(header, ROOT)
    source = folder / f"{name.replace('/', '_')}.cc"
    source.write_text(f'#include "{name}"\n')
    path = os.path.relpath(source, ROOT)
    command = [*_CCACHE, "clang++", *flags, "-w", "-c", path, "-o", f"{path}.o"]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"},
        capture_output=True,
        text=True,
    ).stderr


def test_headers_stand_alone() -> None:
    folder = BUILD / "headers"
    folder.mkdir(exist_ok=True)
    headers = _headers()
    assert {"plan.h", "engine.h", "call.h"} <= {path.name for path in headers}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = pool.map(lambda item: _errors(*item, folder), headers.items())
        assert "".join(errors) == ""


def test_a_header_that_lacks_an_include_is_found(tmp_path: Path) -> None:
    header = tmp_path / "a.h"
    header.write_text("inline std::string f() { return {}; }\n")
    assert "undeclared identifier 'std'" in _errors(
        header, ["-std=c++20", "-I."], tmp_path
    )
