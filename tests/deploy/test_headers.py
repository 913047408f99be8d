"""Tests that the headers outside of preset asan compile alone, and that precompiled
headers contain no path of this clone, so that clones can share them.

In the modules that use neither LibTorch nor gRPC, preset asan compiles each header
alone. Most other headers have a source of the same name that includes them first
(clang-format keeps that order), so the source checks them. This test compiles the
remaining headers, and caches clean results by the text that was compiled. Compiling
all headers without precompiled ones would take five minutes of CPU time.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deploy_files import ROOT

sys.path.insert(0, str(ROOT / "tests" / "lint"))
from checked_once import CheckedOnce, cache_folder
from compile_flags import BUILD, compile_flags, includes_torch

pytestmark = pytest.mark.skipif(
    shutil.which("clang++") is None, reason="no clang++ on this machine"
)


def _headers() -> dict[Path, list[str]]:
    """Returns the headers that this test compiles. The flags of a header are those of
    a source in the same folder."""
    found: dict[Path, list[str]] = {}
    for name, flags in sorted(compile_flags().items()):
        folder = name.split("/")[0]
        torch = folder == "src" and includes_torch(flags)
        if not torch and folder not in ("server", "client"):
            continue
        for header in (ROOT / name).parent.glob("*.h"):
            if not header.with_suffix(".cc").exists():
                found.setdefault(header, flags)
    return found


def _alone() -> CheckedOnce:
    version = subprocess.check_output(["clang++", "--version"])
    return CheckedOnce(
        command=lambda unit, flags: [
            *("clang++", *flags, "-fsyntax-only", "-w"),
            str(unit),
        ],
        not_compiled=re.compile("(?!)"),  # Matches nothing: each part is one header.
        salt=version,
        cache=cache_folder("headers"),
    )


def test_headers_without_a_source_stand_alone() -> None:
    headers = _headers()
    assert {"plan.h", "engine.h", "unary_call.h"} <= {path.name for path in headers}
    parts = [
        (flags, [str(header.relative_to(ROOT))]) for header, flags in headers.items()
    ]
    assert _alone().check_all(parts) == ""


def test_precompiled_headers_have_no_path_of_this_clone() -> None:
    headers = list(BUILD.rglob("cmake_pch.hxx"))
    assert headers
    assert [h for h in headers if str(ROOT) in h.read_text()] == []
