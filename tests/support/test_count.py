"""Tests that run_ctest.sh counts what has no result as failed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


class Folder:
    """A build folder whose entries a test writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[str] = []

    def program(self, name: str, cases: str, status: int = 0) -> None:
        """Adds an entry that writes a report as a GoogleTest program does."""
        report = self.path / "reports" / f"{name}.xml"
        write = f"printf '%s' '<testsuites>{cases}</testsuites>' >{report};"
        command = f"[==[{write if cases else ''} exit {status}]==]"
        output = f"--gtest_output=xml:{report}"
        self.entries.append(f'add_test({name} "sh" "-c" {command} "{output}")')

    def run(self) -> tuple[int, list[str]]:
        """Returns the exit status and the stdout lines of run_ctest.sh."""
        (self.path / "CTestTestfile.cmake").write_text("\n".join(self.entries))
        done = subprocess.run(
            [TESTS / "run_ctest.sh", self.path], capture_output=True, text=True
        )
        return done.returncode, done.stdout.splitlines()


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


# The entry of one test in a GoogleTest report.
CASE = '<testcase classname="Suite" name="One" status="run"></testcase>'


@pytest.mark.parametrize(
    ("cases", "status", "named", "exit_status"),
    [
        ("", 139, "p (crashed or stopped: it has no report)", 8),
        ("", 0, "p (crashed or stopped: it has no report)", 1),
        (" ", 0, "p (its report has no tests)", 1),
        ("<testcase>", 0, "p (crashed or stopped: it has no report)", 1),
        (CASE, 1, "p (failed outside its tests)", 8),
        (CASE.replace("><", "><failure/><"), 1, "p: Suite.One", 8),
    ],
    ids=["crash", "early_exit", "no_tests", "cut_report", "outside", "failed"],
)
def test_an_entry_that_fails_or_has_no_results_is_a_failure(
    folder: Folder, cases: str, status: int, named: str, exit_status: int
) -> None:
    folder.program("p", cases, status)
    found, lines = folder.run()
    assert lines[-2] == f"failed: {named}"
    assert " 1 failed, 0 skipped" in lines[-1]
    assert found == exit_status


def test_a_program_that_is_missing_is_a_failure(folder: Folder) -> None:
    folder.entries.append('add_test(gone "/no/such/program")')
    status, lines = folder.run()
    assert lines[-2:] == ["failed: gone", "0 passed, 1 failed, 0 skipped"]
    assert status == 8


def test_a_report_of_an_earlier_run_does_not_count(folder: Folder) -> None:
    folder.program("program", CASE)
    folder.run()
    folder.entries.clear()
    folder.program("program", "")
    status, lines = folder.run()
    assert lines[-1] == "0 passed, 1 failed, 0 skipped"
    assert status == 1
