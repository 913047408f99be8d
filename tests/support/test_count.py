"""Tests the number of tests that run_ctest.sh prints, with made-up CTest entries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PYTEST = f'"{sys.executable}" "-m" "pytest" "-q" "-p" "no:cacheprovider"'


class Folder:
    """A build folder whose entries a test writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[str] = []

    def add(self, name: str, command: str, argument: str = "") -> None:
        """Adds an entry that runs a shell command, with an argument."""
        self.entries.append(
            f'add_test({name} "sh" "-c" [==[{command}]==] "{argument}")'
        )

    def program(self, name: str, cases: str, status: int = 0) -> None:
        """Adds an entry that writes a report as a GoogleTest program does."""
        report = self.path / "reports" / f"{name}.xml"
        write = f"printf '%s' '<testsuites>{cases}</testsuites>' >{report};"
        self.add(
            name,
            f"{write if cases else ''} exit {status}",
            f"--gtest_output=xml:{report}",
        )

    def pytest(self, name: str, source: str) -> None:
        """Adds an entry that runs a file of Python tests."""
        file = self.path / f"test_{name}.py"
        file.write_text(source)
        report = self.path / "reports" / f"{name}.xml"
        self.entries.append(f'add_test({name} {PYTEST} "--junitxml={report}" "{file}")')

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


def case(name: str, inside: str = "") -> str:
    """Returns the entry of one test in a GoogleTest report."""
    return f'<testcase classname="Suite" name="{name}" status="run">{inside}</testcase>'


def test_the_tests_in_each_entry_are_counted(folder: Folder) -> None:
    folder.program("program", case("One") + case("Two") + case("No", "<skipped/>"))
    folder.pytest(
        "python",
        "import pytest\n"
        "@pytest.mark.parametrize('n', (1, 2))\ndef test_each(n): pass\n"
        "def test_absent(): pytest.skip('no tool')\n",
    )
    folder.add("command", "exit 0")
    folder.add("absent", "exit 77")
    folder.entries.append("set_tests_properties(absent PROPERTIES SKIP_RETURN_CODE 77)")
    status, lines = folder.run()
    assert lines[-1] == "5 passed, 0 failed, 3 skipped"
    assert lines[-4:-1] == [
        "skipped: program: Suite.No",
        "skipped: python: test_python.test_absent",
        "skipped: absent",
    ]
    assert status == 0


def test_a_failed_test_is_named(folder: Folder) -> None:
    folder.program("program", case("One") + case("Two", "<failure/>"), status=1)
    folder.pytest("python", "def test_false(): assert False\n")
    status, lines = folder.run()
    assert lines[-3:] == [
        "failed: program: Suite.Two",
        "failed: python: test_python.test_false",
        "1 passed, 2 failed, 0 skipped",
    ]
    assert status == 8


@pytest.mark.parametrize(
    ("cases", "status", "named", "exit_status"),
    [
        ("", 139, "p (crashed or stopped: it has no report)", 8),
        ("", 0, "p (crashed or stopped: it has no report)", 1),
        (" ", 0, "p (its report has no tests)", 1),
        ("<testcase>", 0, "p (crashed or stopped: it has no report)", 1),
        (case("One"), 1, "p (failed outside its tests)", 8),
    ],
    ids=["crash", "early_exit", "no_tests", "cut_report", "outside"],
)
def test_an_entry_without_results_is_a_failure(
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
    folder.program("program", case("One"))
    folder.run()
    folder.entries.clear()
    folder.program("program", "")
    status, lines = folder.run()
    assert lines[-1] == "0 passed, 1 failed, 0 skipped"
    assert status == 1
