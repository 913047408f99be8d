"""Runs Clang's thread-safety analysis over what the sanitizer builds leave out.

Preset asan analyzes the modules that use neither Torch nor gRPC. This test analyzes
the server, the clients and the engine's threads. It generates no code, and takes the
flags from preset dev. Clean results are cached by the text
that was analyzed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deploy_files import ROOT

sys.path.insert(0, str(ROOT / "tests" / "lint"))
from checked_once import CheckedOnce, cache_folder, parts
from compile_flags import compile_flags

FOLDERS = ("server", "client", "tests/support", "src/engine")
# clang 14 cannot read std::views of GCC's library. These sources have no locks.
UNREADABLE = ("src/engine/decode/sample_sequences.cc",)
# If the first lock of any of these sources is removed, the analysis must fail.
LOCKED = (
    "src/engine/device/compute_guard.cc",
    "server/grpc/sample_stream.cc",
    "client/step_counter.cc",
    "tests/support/canned_engine.cc",
)
_NOT_COMPILED = re.compile(
    r"^(?:.*/)?((?:src|server|client|tests)/\S+?):\d+:\d+: (?:fatal )?error: "
    r"(?!.*\[-Werror,-Wthread-safety)",
    re.MULTILINE,
)
_LOCK = re.compile(r"^ *(absl::)?MutexLock \w+\(.*\);\n", re.MULTILINE)

pytestmark = pytest.mark.skipif(
    shutil.which("clang++") is None, reason="no clang++ on this machine"
)


def _sources() -> dict[str, list[str]]:
    """Returns the flags of every source in FOLDERS."""
    flags = compile_flags()
    folders = tuple(f"{folder}/" for folder in FOLDERS)
    return {
        name: flags[name]
        for name in flags
        if name.startswith(folders) and name not in UNREADABLE
    }


def _command(unit: Path, flags: list[str]) -> list[str]:
    options = ["-fsyntax-only", "-Wno-everything"]
    options += ["-Wthread-safety", "-Werror=thread-safety"]
    return ["clang++", *flags, *options, str(unit)]


def _analysis(cache: Path) -> CheckedOnce:
    version = subprocess.check_output(["clang++", "--version"])
    return CheckedOnce(
        command=_command,
        not_compiled=_NOT_COMPILED,
        salt=version + repr(_command(Path(), [])).encode(),
        cache=cache,
    )


def test_every_guarded_member_is_used_under_its_lock() -> None:
    sources = _sources()
    assert {name.split("/")[0] for name in sources} >= {"server", "client", "src"}
    analysis = _analysis(cache_folder("thread-safety"))
    assert analysis.check_all(parts(sources)) == ""


@pytest.mark.parametrize("name", LOCKED)
def test_a_lock_that_is_not_held_is_found(name: str, tmp_path: Path) -> None:
    text, removed = _LOCK.subn("", (ROOT / name).read_text(), count=1)
    assert removed == 1
    source = tmp_path / Path(name).name
    source.write_text(text)
    found = _analysis(tmp_path / "cache").check([str(source)], _sources()[name])
    assert "requires holding mutex" in found
