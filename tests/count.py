"""Counts the tests in the entries of one ctest run: count.py REPORTS.

An entry of ctest is a GoogleTest program, a pytest run, or a command. REPORTS has
what ctest says of each entry (ctest.xml), its command (entries.json), and
one file for each entry that writes a report. An entry without a report is one test.
Names the failed and the skipped tests, and exits with 1 if a test failed.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

# The flag that tells GoogleTest or pytest where to write its report.
REPORT = re.compile(r"--(?:gtest_output=xml:|junitxml=)(.+)")


@dataclass(frozen=True)
class Outcome:
    """What became of one test: passed, failed or skipped."""

    name: str
    result: str


def _result(case: ElementTree.Element) -> str:
    if any(case.find(tag) is not None for tag in ("failure", "error")):
        return "failed"
    not_run = case.get("status") in ("notrun", "disabled")
    return "skipped" if not_run or case.find("skipped") is not None else "passed"


def _cases(report: Path) -> list[Outcome]:
    """Returns the tests in a report. Raises ParseError if the report ends early."""
    return [
        Outcome(f"{case.get('classname')}.{case.get('name')}", _result(case))
        for case in ElementTree.parse(report).iter("testcase")
    ]


def outcomes(entry: str, result: str, report: Path | None) -> list[Outcome]:
    """Returns what became of an entry's tests.

    `result` is ctest's, and `report` is the file that the entry should have written.
    """
    if report is None or result == "not run":
        return [Outcome(entry, "failed" if result == "not run" else result)]
    try:
        cases = _cases(report)
    except (OSError, ElementTree.ParseError):
        return [Outcome(f"{entry} (crashed or stopped: it has no report)", "failed")]
    if not cases and result == "passed":
        return [Outcome(f"{entry} (its report has no tests)", "failed")]
    named = [Outcome(f"{entry}: {case.name}", case.result) for case in cases]
    if result == "failed" and all(case.result != "failed" for case in named):
        named.append(Outcome(f"{entry} (failed outside its tests)", "failed"))
    return named


def _entry_result(case: ElementTree.Element) -> str:
    """Returns passed, failed or skipped. If the program is missing: `not run`."""
    if case.get("status") == "fail":
        return "failed"
    if case.get("status") == "run":
        return "passed"
    skipped = case.find("skipped")
    reason = "" if skipped is None else skipped.get("message", "")
    skips = case.get("status") == "disabled" or reason.startswith("SKIP_")
    return "skipped" if skips else "not run"


def count(reports: Path) -> list[Outcome]:
    """Returns what became of each test of a run."""
    entries = json.loads((reports / "entries.json").read_text())["tests"]
    paths: dict[str, Path] = {}
    for entry in entries:
        for argument in entry.get("command", []):
            match = REPORT.fullmatch(argument)
            if match:
                paths[entry["name"]] = Path(match[1])
    found: list[Outcome] = []
    for case in ElementTree.parse(reports / "ctest.xml").iter("testcase"):
        name = case.get("name", "")
        found += outcomes(name, _entry_result(case), paths.get(name))
    return found


def main() -> int:
    """Prints the names of failed and skipped tests and the count of all."""
    found = count(Path(sys.argv[1]))
    number = {"passed": 0, "failed": 0, "skipped": 0}
    for outcome in found:
        number[outcome.result] += 1
    for result in ("skipped", "failed"):
        for outcome in found:
            if outcome.result == result:
                print(f"{result}: {outcome.name}")
    print(", ".join(f"{n} {result}" for result, n in number.items()))
    return 1 if number["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
