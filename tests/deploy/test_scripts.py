"""Tests the scripts that a new user runs first, and the protos that they build."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_stop_at_the_first_error(script: Path) -> None:
    assert "set -euo pipefail" in script.read_text("utf-8")


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


def test_demo_texts_answer_every_topic_in_their_own_words() -> None:
    run(
        str(ROOT / ".venv/bin/python"),
        "-c",
        "import demo_texts as d\n"
        "sets = (d.PIRATE, d.GARDENER, d.SHIP_LOG)\n"
        "assert all(len(s) == len(d.TOPICS) == 12 for s in sets)\n"
        "assert len({text for s in sets for text in s}) == 36\n",
        cwd=DEPLOY,
    )


def test_buf_finds_nothing_in_the_protos() -> None:
    run(tool("buf"), "lint", "proto")
