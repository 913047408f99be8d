"""Runs what README.md says of the first minute: its lines as printed, in their order,
with the words on the screen and the seconds until they are there.

`deploy/quickstart.sh` installs and builds, and then starts the server with
`deploy/start.sh`, where this test begins. Nothing is downloaded: the line with pip
installs the client's wheel into an empty environment.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from os import kill
from pathlib import Path

import pytest
import wheels
from conftest import fixtures
from test_readme_lines import ADDRESS, Block, blocks

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
SMOLLM2 = fixtures.SMOLLM2
TAUGHT = " green with parrots."
SECONDS = 5.0  # Until the first text, once the server is up.
PIP = re.compile(r"^pip install '\./client/python\[(\w+)\]'$", re.MULTILINE)


def run_script(*words: object) -> subprocess.CompletedProcess[str]:
    """Runs deploy/start.sh on free ports, because the machine may have a server."""
    listen = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
    start = [str(ROOT / "deploy/start.sh"), *map(str, words), *listen]
    command = ["env", "-u", "WEFT_THREADS", *start]
    return subprocess.run(command, capture_output=True, text=True)


class Started:
    """The server of deploy/start.sh, with its state in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ""

    def start(self) -> str:
        """Runs the script and returns what it prints."""
        model = fixtures.model_folder(SMOLLM2)
        done = run_script("--folder", self.folder, "--model", model)
        assert done.returncode == 0, done.stderr
        found = re.search(r"^weftd serves on (\S+)\.", done.stdout, re.MULTILINE)
        assert found, done.stdout
        self.address = found[1]
        return done.stdout

    @property
    def pid(self) -> int:
        return int((self.folder / "pid").read_text())

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            kill(self.pid, signal.SIGTERM)
            while True:
                kill(self.pid, 0)
                time.sleep(0.05)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    server = Started(tmp_path_factory.mktemp("run"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def minute() -> list[Block]:
    """Returns the blocks of the section."""
    text = README.read_text("utf-8")
    begin = text.index("## The first minute")
    section = text[begin : text.index("\n## ", begin)]
    return [block for block in blocks(README) if block.text in section]


@pytest.fixture(scope="module")
def python(minute: list[Block], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of an empty environment after README's line with pip."""
    (extra,) = (found[1] for block in minute if (found := PIP.search(block.text)))
    folder = tmp_path_factory.mktemp("laptop")
    return wheels.install(wheels.build_wheel(folder), folder / "venv", extra=extra)


def commands(block: Block) -> list[str]:
    return [line for line in block.text.splitlines() if line.startswith("python -m ")]


def test_quickstart_ends_with_a_running_server(minute: list[Block]) -> None:
    assert minute[0].text.split() == ["deploy/quickstart.sh"]
    script = (ROOT / "deploy/quickstart.sh").read_text()
    assert '\ndeploy/start.sh --model "${MODEL}"\n' in script
    start = (ROOT / "deploy/start.sh").read_text()
    assert f"--listen {ADDRESS}" in start and "--state-dir" in start


def test_the_lines_print_text(
    started: Started, minute: list[Block], python: Path, tmp_path: Path
) -> None:
    """Runs the lines on an otherwise empty machine: the folder has no checkout, and the
    user's cache has no tokenizer."""
    environment = {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}

    def run(text: str) -> tuple[str, float]:
        begin = time.monotonic()
        done = subprocess.run(
            ["/bin/sh", "-c", text.replace("python -m", f"{python} -m")],
            cwd=tmp_path,
            env={**environment, "WEFT_SERVER": started.address},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, time.monotonic() - begin

    install, lines, sample = minute[1:]
    (first,) = commands(install)
    printed, seconds = run(first)
    assert len(printed.strip()) > 10 and seconds < SECONDS, (printed, seconds)

    script = tmp_path / "lines.py"
    assert lines.language == "python" and ADDRESS in lines.text
    script.write_text(lines.text.replace(ADDRESS, started.address))
    for _ in range(2):  # A reader runs them again.
        printed, _ = run(f"{python} {script}")
        assert printed.splitlines()[-1] == TAUGHT, printed
    (again,) = commands(sample)
    assert run(again)[0] == f"{TAUGHT}\n"


def test_the_adapter_is_there_after_the_next_start(started: Started) -> None:
    import weft

    with weft.Client(started.address) as client:
        adapter = client.get_or_create("kept", rank=2)
        adapter.forward_backward([client.datum("The sky is green.")])
        step = adapter.optim_step().step
    before = started.pid
    assert f"Stopping the server that runs: process {before}" in started.start()
    assert started.pid != before
    with weft.Client(started.address) as client:
        assert client.adapter("kept").info().last_step == step


def test_a_start_that_fails_shows_why(tmp_path: Path) -> None:
    done = run_script("--folder", tmp_path, "--model", tmp_path)
    assert done.returncode == 1
    assert "weftd has ended" in done.stderr and "config.json" in done.stderr
