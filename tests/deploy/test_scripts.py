"""Tests the scripts that a new user runs first, and the protos that they build."""

from __future__ import annotations

import re
import subprocess

from deploy_files import DEPLOY, ROOT, run, tool

SCRIPTS = sorted(
    [
        *DEPLOY.rglob("*.sh"),
        *ROOT.glob("tests/*.sh"),
        *ROOT.glob("tests/*/*.sh"),
        ROOT / ".ci" / "run",
    ]
)


def test_shellcheck_finds_nothing() -> None:
    assert len(SCRIPTS) >= 4
    run(tool("shellcheck"), *map(str, SCRIPTS))


def test_setup_refuses_unknown_options() -> None:
    done = subprocess.run(
        [str(DEPLOY / "setup.sh"), "--gpu"], text=True, capture_output=True
    )
    assert done.returncode == 2
    assert "unknown option --gpu" in done.stderr


def test_every_requirement_is_pinned_and_agrees_with_the_constraints() -> None:
    pinned = set((DEPLOY / "constraints.txt").read_text().split())
    for path in DEPLOY.glob("requirements-*.txt"):
        for line in path.read_text().splitlines():
            if line and not line.startswith("#"):
                assert re.fullmatch(r"[\w.-]+==[\w.]+", line), line
                # The Tinker SDK has its own environment and is installed
                # without dependencies.
                if path.name != "requirements-tinker.txt":
                    assert line in pinned, f"{path.name}: {line}"


def test_buf_finds_nothing_in_the_protos() -> None:
    run(tool("buf"), "lint", "proto")
