"""Tests that kernels/README.md lists exactly the CPU kernels that exist."""

import re

from sources import ROOT

_MEMBER = re.compile(r"\(\*(\w+)\)\(")
_NAME = re.compile(r"`(\w+)`")


def test_the_page_has_each_kernel_of_a_table() -> None:
    tables = [path.read_text() for path in (ROOT / "kernels/cpu").glob("*.h")]
    page = (ROOT / "kernels/README.md").read_text()
    rows = page.split("## On a CPU")[1].split("## On CUDA")[0].splitlines()
    first_cells = [row.split("|")[1] for row in rows if row.startswith("| `")]
    named = set(_NAME.findall(" ".join(first_cells)))
    assert named == set(_MEMBER.findall(" ".join(tables)))
