"""Finds tests that depend on what else the machine has: a port that a server may hold,
a file that another test may have written, or the processes of some name.

A test takes port 0, free_port() of tests/oracle/daemon.py or closed_port() of
tests/client/conftest.py, a folder of its own (tests/support/temp_folder.h, tmp_path),
and the ids of the processes that it started.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sources import CPP_SUFFIXES, files

SUFFIXES = CPP_SUFFIXES | {".py", ".sh", ".jsonl"}

# What the files of these names may have, with the reason.
_PARSED = "addresses that are parsed or shown, and neither bound nor called"
_TEXT = "the text of a page or a configuration, which is compared or replaced"
ALLOWED: dict[str, tuple[str, set[str]]] = {
    "connection_test.cc": ("refused before a call", {"1"}),
    "doors.py": (_TEXT, {"50051", "9400", "8460"}),
    "edge_server.py": (_TEXT, {"50051", "9400", "8460", "8443"}),
    "flags_test.cc": (_PARSED, {"50051"}),
    "http_test.cc": (_PARSED, {"1", "2", "80", "9400"}),
    "mistakes.jsonl": (_PARSED, {"50051", "70000", "8443"}),
    "options_test.cc": (_PARSED, {"50051"}),
    "python_api_test.py": (_PARSED, {"1", "2"}),
    "python_logic_test.py": (_PARSED, {"1", "65535"}),
    "python_openai_access_test.py": (_PARSED, {"1", "80", "443", "3000", "8000"}),
    "python_security_test.py": ("a proxy that is not called", {"1", "9"}),
    "test_attacks.py": ("the Host of a request", {"200", "8443"}),
    "test_container.py": (_TEXT, {"50051", "9400", "/tmp/"}),
    "test_doors.py": ("a header that nobody heeds", {"1"}),
    # It asks 8443 in a network of its own.
    "test_files.py": (_TEXT, {"50051", "9400", "8460", "8443"}),
    "test_image.py": (_TEXT, {"50051", "9400"}),
    "test_manifests_match_daemon.py": (_TEXT, {"50051", "9400"}),
    "test_readme_lines.py": (_TEXT, {"50051"}),
    "test_standby_files.py": (_TEXT, {"443", "50051", "9400"}),
    "tinker_front_fixture.cc": (_PARSED, {"9"}),
    "tinker_scopes_test.cc": (_PARSED, {"9"}),
    "weftctl_test.cc": ("a proxy that is not called", {"9"}),
    "weftctl_token_test.cc": (_PARSED, {"1"}),
    "world_test.cc": (_PARSED, {"29500", "7", "1", "65536"}),
}

_HOST = r"(?:localhost|127(?:\.\d+){3}|0\.0\.0\.0|\[::1?\])"
_PORT = r"(?P<port>[1-9]\d{0,4})\b(?!\.)"
# The ports of the service itself are found without an address.
_PATTERNS = {
    "take a free port": (
        rf"{_HOST}(?::|[\"'],\s*){_PORT}",
        rf"(?i)(?<![a-z])port\w*[\"']?[ ,:=]+[\"']?{_PORT}",
        rf"\bhtons\(\s*{_PORT}",
        r"\b(?P<port>50051|9400|8460|8443)\b",
    ),
    "take a folder of the test's own": (
        r"\bTempDir\(\)",
        r"(?<![\w}/])/(?:var/)?tmp/",
        r"(?<![\w}/])/dev/shm/(?!\w*XXXXXX)",
    ),
    "keep the process's id": (r"\b(?:pkill|pgrep|killall|pidof)\b",),
}
_COMPILED = [
    (re.compile(pattern), way_out)
    for way_out, patterns in _PATTERNS.items()
    for pattern in patterns
]


class Dependence(NamedTuple):
    line: int
    what: str  # A port, or the words that name a file or a process.
    way_out: str


def dependences(text: str) -> Iterator[Dependence]:
    """Yields what a test's source says of the machine, each once in its line."""
    for number, line in enumerate(text.splitlines(), start=1):
        found = {
            match.groupdict().get("port") or match[0]: way_out
            for pattern, way_out in _COMPILED
            for match in pattern.finditer(line)
        }
        for what, way_out in found.items():
            yield Dependence(number, what, way_out)


def machine_offences(root: Path) -> list[str]:
    """Returns one `file:line: reason` for each dependence that is not allowed, and for
    each allowance of an existing file that nothing needs."""
    found = []
    unused: dict[str, set[str]] = {}
    for path in files(root, ("tests",), SUFFIXES):
        if path.parent.name == "lint":
            continue
        _, allowed = ALLOWED.get(path.name, ("", set()))
        left = unused.setdefault(path.name, set(allowed))
        for line, what, way_out in dependences(path.read_text()):
            left.discard(what)
            if what not in allowed:
                found.append(
                    f"{path.relative_to(root)}:{line}: {what}: {way_out}, or say in "
                    "tests/lint/machine.py why not"
                )
    return found + [
        f"{name}: has no {what} any more" for name in unused for what in unused[name]
    ]
