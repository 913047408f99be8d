"""Tests that clang-tidy finds nothing in the product's sources, and that it finds
each offence in bad examples."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from deploy_files import ROOT

sys.path.insert(0, str(ROOT / "tests" / "lint"))
from checked_once import CheckedOnce, cache_folder
from clang_tidy import clang_tidy, tidy_parts

pytestmark = pytest.mark.skipif(
    shutil.which("clang-tidy") is None, reason="no clang-tidy on this machine"
)

FLAGS = ["-std=c++20", "-I."]
BAD = {
    "bugprone-use-after-move": """#include <string>
#include <utility>
void Take(std::string);
char f(std::string s) { Take(std::move(s)); return s[0]; }
""",
    "readability-function-size": "void f() {\n" + 70 * ";\n" + "}\n",
    "clang-diagnostic-error": "int f() { return x; }\n",
}
CLEAN = "int g() { return 1; }\n"


@pytest.fixture
def tidy(tmp_path: Path) -> CheckedOnce:
    (tmp_path / "src").mkdir()
    return clang_tidy(cache=tmp_path / "cache", root=tmp_path)


def _write(tidy: CheckedOnce, name: str, text: str) -> str:
    (tidy.root / "src" / name).write_text(text)
    return f"src/{name}"


def test_nothing_is_found() -> None:
    all_parts = tidy_parts()
    names = [name for _, sources in all_parts for name in sources]
    assert {name.split("/")[0] for name in names} >= {"src", "server", "client"}
    assert clang_tidy(cache=cache_folder("clang-tidy")).check_all(all_parts) == ""


@pytest.mark.parametrize("check", BAD)
def test_finds_each_offence(tidy: CheckedOnce, check: str) -> None:
    sources = [_write(tidy, "bad.cc", BAD[check]), _write(tidy, "clean.cc", CLEAN)]
    for _ in range(2):  # A source with findings is not cached.
        found = tidy.check(sources, FLAGS)
        assert check in found and "src/bad.cc" in found, found
        assert "clean.cc" not in found


def test_a_header_that_changes_is_read_again(tidy: CheckedOnce) -> None:
    header = _write(tidy, "a.h", "int f();\n")
    sources = [_write(tidy, "a.cc", f'#include "{header}"\n')]
    for _ in range(2):
        assert tidy.check(sources, FLAGS) == ""
    _write(tidy, "a.h", BAD["readability-function-size"])
    assert "readability-function-size" in tidy.check(sources, FLAGS)
    _write(tidy, "a.h", "int f();\n")
    assert tidy.check(sources, FLAGS) == ""
    assert tidy.runs == 2 * [sources]
