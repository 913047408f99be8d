"""Tests that names of parametrised tests describe their parameters in words."""

from pathlib import Path

import pytest
from param_names import param_name_offences
from sources import ROOT


def test_every_suite_names_its_tests() -> None:
    offences = param_name_offences(ROOT)
    assert not offences, "\n" + "\n".join(offences)


@pytest.mark.parametrize(
    ("arguments", "is_named"),
    [
        ("All, ATest, Values(1, 2)", False),
        ("All, ATest,\n  Combine(Values(1, 2), Values(A{1, 2}, B{}))", False),
        ("All, ATest, Values(1, 2), Name", True),
        ("All, ATest, Values(1),\n  [](const auto& test) { return F(1, 2); }", True),
    ],
)
def test_finds_suites_without_names(
    tmp_path: Path, arguments: str, is_named: bool
) -> None:
    path = tmp_path / "tests" / "kv" / "a_test.cc"
    path.parent.mkdir(parents=True)
    path.write_text(f"int a;\nINSTANTIATE_TEST_SUITE_P({arguments});\n")
    found = param_name_offences(tmp_path)
    assert len(found) == (0 if is_named else 1)
    if found:
        assert found[0].startswith("tests/kv/a_test.cc:2: ")
