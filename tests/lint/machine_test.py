"""Tests that tests do not depend on what else the machine has."""

from pathlib import Path

import pytest
from machine import dependences, machine_offences
from sources import ROOT


def test_tests_need_nothing_that_the_machine_may_have() -> None:
    offences = machine_offences(ROOT)
    assert not offences, "\n" + "\n".join(offences)


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ('Bind("127.0.0.1:7000");', "7000"),
        ('Bind("[::1]:7000");', "7000"),
        ('bind(("localhost", 7000))', "7000"),
        ("place.sin_port = htons(7000);", "7000"),
        ("serve(port=7000)", "7000"),
        ("curl --port 7000", "7000"),
        ("LISTEN = 50051", "50051"),
        ("page(9400)", "9400"),
        ('::testing::TempDir() + "/file"', "TempDir()"),
        ('Path("/tmp/file")', "/tmp/"),
        ("cat /var/tmp/file", "/var/tmp/"),
        ('open("/dev/shm/file")', "/dev/shm/"),
        ("pkill weftd", "pkill"),
    ],
)
def test_finds_each_kind(code: str, what: str) -> None:
    (found,) = dependences("\n" + code)
    assert (found.line, found.what) == (2, what)


@pytest.mark.parametrize(
    "code",
    [
        'Bind("127.0.0.1:0");',
        'bind(("127.0.0.1", 0))',
        'make_certificate("localhost", "127.0.0.1")',
        "support = 7",
        'std::string path = "/dev/shm/journal_XXXXXX";',
        'mount -t tmpfs tmpfs "${root}/tmp"',
        "tmp_path / 'file'",
    ],
)
def test_leaves_the_rest_alone(code: str) -> None:
    assert not list(dependences(code))


def test_names_the_file_and_what_no_longer_needs_its_allowance(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "a.py").write_text("\nserve(port=7000)\n")
    (folder / "test_readme_lines.py").write_text("")
    assert machine_offences(tmp_path) == [
        "tests/a.py:2: 7000: take a free port, or say in tests/lint/machine.py why not",
        "test_readme_lines.py: has no 50051 any more",
    ]
