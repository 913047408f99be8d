"""Tests that clang-tidy finds nothing in the product's sources."""

from __future__ import annotations

import shutil
import sys

import pytest
from deploy_files import ROOT

sys.path.insert(0, str(ROOT / "tests" / "lint"))
from checked_once import cache_folder
from clang_tidy import clang_tidy, tidy_parts


@pytest.mark.skipif(
    shutil.which("clang-tidy") is None, reason="no clang-tidy on this machine"
)
def test_nothing_is_found() -> None:
    all_parts = tidy_parts()
    names = [name for _, sources in all_parts for name in sources]
    assert {name.split("/")[0] for name in names} >= {"src", "server", "client"}
    assert clang_tidy(cache=cache_folder("clang-tidy")).check_all(all_parts) == ""
