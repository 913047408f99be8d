"""Tests that tests do not depend on what else the machine has."""

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
