"""Tests the scripts that a new user runs first, and the protos that they build."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
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


def run_ci(folder: Path, port: int, status: int = 0) -> tuple[int, str]:
    """Runs .ci/run in a folder with two commands of this test: a quickstart that ends
    with `status` and leaves a process as its server, and tests that fail. Returns the
    exit status and the output."""
    scripts = {
        "deploy/start.sh": f"weftd --listen 127.0.0.1:{port} --state-dir x",
        "deploy/quickstart.sh": f"""#!/bin/sh
            mkdir -p run/quickstart
            {sys.executable} -c 'import time; time.sleep(1000)' \
              "$PWD/run/quickstart/state" >/dev/null 2>&1 &
            until grep -qz quickstart/state "/proc/$!/cmdline"; do sleep 0.01; done
            echo $! >run/quickstart/pid
            exit {status}
            """,
        "tests/run.sh": """#!/bin/sh
            if [ -s run/quickstart/pid ]; then kill -0 "$(cat run/quickstart/pid)"; fi
            echo "tests of $1"
            exit 4
            """,
    }
    for name, text in scripts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    done = subprocess.run([folder / ".ci/run"], capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("status", "outcome"), [(0, (4, "tests of all\n")), (3, (3, ""))]
)
def test_ci_runs_the_tests_beside_a_server_and_ends_it(
    status: int, outcome: tuple[int, str], tmp_path: Path
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert run_ci(tmp_path, closed.getsockname()[1], status) == outcome
    pid = (tmp_path / "run/quickstart/pid").read_text().strip()
    line = Path("/proc", pid, "cmdline")
    assert not line.exists() or not line.read_bytes()  # A zombie's is empty.


def test_ci_runs_the_tests_beside_what_holds_the_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        status, printed = run_ci(tmp_path, other.getsockname()[1])
    assert status == 4 and printed.endswith("listens there.\ntests of all\n")
    assert not (tmp_path / "run").exists()


def test_setup_refuses_unknown_options() -> None:
    done = subprocess.run(
        [str(DEPLOY / "setup.sh"), "--gpu"], text=True, capture_output=True
    )
    assert done.returncode == 2
    assert "unknown option --gpu" in done.stderr


def settings_of_uv(folder: Path, pip_conf: str, **variables: str) -> dict[str, str]:
    """Runs setup.sh in a checkout with a uv that installs nothing. Returns the
    environment that uv gets, and its words as `words`."""
    shutil.copytree(DEPLOY, folder / "deploy")
    (folder / "pip.conf").write_text(pip_conf)
    python, uv = (str(ROOT / ".venv/bin" / name) for name in ("python", "uv"))
    seen = folder / "seen"
    scripts = {
        "bin/dpkg-query": "true",
        "bin/apt-get": "true",
        ".venv/bin/python": f'exec {python} "$@"',
        ".venv/bin/uv": f"""
            if [ "$1" = cache ]; then exec {uv} "$@"; fi
            env -0 >{seen}; printf 'words=%s\\0' "$*" >>{seen}""",
    }
    for name, text in scripts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    own = {
        "PATH": path,
        "HOME": str(folder),
        "PIP_CONFIG_FILE": str(folder / "pip.conf"),
    }
    subprocess.run(
        [folder / "deploy/setup.sh", "--cpu"], env={**own, **variables}, check=True
    )
    entries = seen.read_text().rstrip("\0").split("\0")
    return dict(entry.split("=", 1) for entry in entries)


PIP_CONF = """
[global]
index-url = https://index.example/simple
extra-index-url =
    https://one.example/simple
    https://two.example/it's
find-links = /wheels /more
proxy = http://proxy.example:3128
cert = /etc/a file.pem
no-index = yes
[install]
trusted-host = one.example
    two.example:8080
[download]
index-url = https://other.example/simple
"""


def test_uv_gets_the_settings_of_pip(tmp_path: Path) -> None:
    settings = settings_of_uv(tmp_path, PIP_CONF)
    assert (
        settings.items()
        >= {
            "UV_DEFAULT_INDEX": "https://index.example/simple",
            "UV_INDEX": "https://one.example/simple https://two.example/it's",
            "UV_FIND_LINKS": "/wheels,/more",
            "UV_INSECURE_HOST": "one.example two.example:8080",
            "HTTPS_PROXY": "http://proxy.example:3128",
            "SSL_CERT_FILE": "/etc/a file.pem",
        }.items()
    )
    assert " --no-index " in settings["words"]


def test_the_users_own_settings_of_uv_win(tmp_path: Path) -> None:
    own = {
        "UV_INDEX_URL": "https://mine.example/simple",
        "UV_INDEX": "",
        "SSL_CERT_FILE": "/my.pem",
        "PIP_FIND_LINKS": "/variable",
    }
    settings = settings_of_uv(tmp_path, PIP_CONF, **own)
    assert settings.items() >= own.items()
    assert "UV_DEFAULT_INDEX" not in settings
    assert settings["UV_FIND_LINKS"] == "/variable"


def test_a_user_without_a_home_installs_without_a_cache(tmp_path: Path) -> None:
    settings = settings_of_uv(tmp_path / "without", "", HOME="/dev/null")
    assert settings["UV_NO_CACHE"] == "1"
    assert "UV_NO_CACHE" not in settings_of_uv(tmp_path / "with", "")


PINNED = re.compile(r"([a-z0-9-]+)==([\w.+]+)((?: --hash=sha256:[0-9a-f]{64})+)")


def lines_of(name: str) -> list[str]:
    lines = (DEPLOY / name).read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.mark.parametrize(
    "name", ["constraints.txt", "requirements-stores.txt", "requirements-tinker.txt"]
)
def test_every_package_is_pinned_to_one_version_and_its_files(name: str) -> None:
    found = [PINNED.fullmatch(line) for line in lines_of(name)]
    names = [match and match[1] for match in found]
    assert None not in names and len(set(names)) == len(names) > 10


@pytest.mark.parametrize("name", ["requirements-runtime.txt", "requirements-test.txt"])
def test_every_package_that_is_installed_is_in_the_constraints(name: str) -> None:
    pinned = {line.partition("==")[0] for line in lines_of("constraints.txt")}
    assert {line.lower() for line in lines_of(name)} <= pinned


# setup.sh gives uv constraints, and an image gives pip requirements.
INSTALLERS = {
    "uv": ["uv", "pip", "install", "--no-cache", "loom", "-c"],
    "pip": ["pip", "install", "--no-cache-dir", "--no-deps", "-r"],
}


@pytest.mark.parametrize("installer", INSTALLERS)
def test_a_package_with_other_bytes_is_not_installed(
    installer: str, tmp_path: Path
) -> None:
    wheel = tmp_path / "loom-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        about = "loom-1.dist-info/"
        archive.writestr(
            about + "METADATA", "Metadata-Version: 2.1\nName: loom\nVersion: 1"
        )
        archive.writestr(
            about + "WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any",
        )
        archive.writestr(about + "RECORD", "")
    program, *words = INSTALLERS[installer]
    target = tmp_path / "target"
    for digest in ("0" * 64, hashlib.sha256(wheel.read_bytes()).hexdigest()):
        pinned = tmp_path / "pinned.txt"
        pinned.write_text(f"loom==1 --hash=sha256:{digest}\n")
        done = subprocess.run(
            [
                *(str(ROOT / ".venv" / "bin" / program), *words, str(pinned)),
                *("--no-index", "--find-links", str(tmp_path)),
                *("--target", str(target)),
            ],
            text=True,
            capture_output=True,
        )
        refused = digest == "0" * 64
        assert (done.returncode != 0) == refused, done.stderr
        assert (target / "loom-1.dist-info").exists() != refused
        assert ("hash" in done.stderr.lower()) == refused


def test_buf_finds_nothing_in_the_protos() -> None:
    run(tool("buf"), "lint", "proto")
