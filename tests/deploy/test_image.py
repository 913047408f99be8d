"""Builds image runtime-cpu from the Dockerfile and runs it as clusters do.

The image runs as its own user, with a read-only root, no capabilities, and no network
except a loopback. unshare, chroot and setpriv stand in for a container engine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deploy_files import DEPLOY, ROOT, run

sys.path.insert(0, str(ROOT / "tests" / "oracle"))

STORE = Path(os.environ.get("WEFT_IMAGE_STORE", ROOT / "build" / "image"))
DOCKERFILE = DEPLOY / "Dockerfile"
IMAGE = "weft:cpu"
MOST_BYTES = 2e9
START_SECONDS = 120.0
STOP_SECONDS = 60.0

# The arguments are the root file system, the model, the state and the user. The
# arguments of env follow: variables and the command.
START = """
set -eu
root="$1" model="$2" state="$3" user="$4"
shift 4
mount --bind "${root}" "${root}"
mount -o remount,bind,ro "${root}"
mount --bind "${model}" "${root}/models/base"
mount -o remount,bind,ro "${root}/models/base"
mount --bind "${state}" "${root}/var/lib/weft"
mount -t tmpfs tmpfs "${root}/tmp"
mount -t proc proc "${root}/proc"
mount --bind /dev/null "${root}/dev/null"
mount --bind /dev/urandom "${root}/dev/urandom"
ip link set lo up
exec chroot "${root}" setpriv --reuid "${user}" --regid "${user}" --clear-groups \
  --no-new-privs --bounding-set=-all --inh-caps=-all \
  env --ignore-environment --chdir=/var/lib/weft "$@"
"""


def engine(*words: str) -> str:
    driver = "overlay" if (STORE / "root" / "overlay").exists() else "vfs"
    store = ["--root", str(STORE / "root"), "--runroot", str(STORE / "run")]
    return run("buildah", *store, "--storage-driver", driver, *words)


def build() -> None:
    """Builds the image, which takes long. build.log in the store shows the progress."""
    STORE.mkdir(parents=True, exist_ok=True)
    script = ROOT / "tests" / "deploy" / "build_image.sh"
    log = STORE / "build.log"
    with log.open("wb") as output:
        done = subprocess.run([script, STORE, IMAGE], stdout=output, stderr=output)
    assert done.returncode == 0, log.read_text(errors="replace")[-4000:]


@pytest.fixture(scope="module")
def image() -> dict[str, Any]:
    """Returns the image's description."""
    for name in ("buildah", "debootstrap"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed: the image was NOT built")
    if os.geteuid() != 0:
        pytest.skip("not root: the image was NOT built")
    build()
    found: dict[str, Any] = json.loads(engine("inspect", "--type", "image", IMAGE))
    return found


@pytest.fixture(scope="module")
def root(image: dict[str, Any]) -> Iterator[Path]:
    """Returns the image's files, in a container that is removed afterwards."""
    container = engine("from", "--pull=never", IMAGE).strip()
    folder = Path(engine("mount", container).strip())
    # A container engine would create these mount points.
    (folder / "models" / "base").mkdir(parents=True)
    for device in ("null", "urandom"):
        (folder / "dev" / device).touch()
    yield folder
    engine("umount", container)
    engine("rm", container)


class Container:
    """Runs the image's command on a model. The state folder outlives the container."""

    def __init__(
        self, root: Path, image: dict[str, Any], model: Path, state: Path
    ) -> None:
        config = image["Docker"]["config"]
        self.root = root
        # The OCI format has no health check, so it is read from the Dockerfile.
        _, runtime = DOCKERFILE.read_text().split(" AS runtime-base\n")
        check = re.search(r"HEALTHCHECK .+\\\n\s+CMD (\[.+\])", runtime)
        assert check
        self.health = json.loads(check[1])
        self.signal = signal.Signals[config["StopSignal"]]
        user = config["User"].split(":")[0]
        command = ["unshare", "--mount", "--net", "--ipc", "--pid", "--fork"]
        command += ["--kill-child", "sh", "-c", START, "start"]
        command += [str(root), str(model), str(state), user]
        command += [*config["Env"], *config["Entrypoint"]]
        self._log_path = state.parent / "log"
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.pid = 0

    def log(self) -> str:
        return self._log_path.read_text("utf-8", errors="replace")

    def inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container as root, like kubectl exec."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--net", "--pid"]
        return subprocess.run(
            [*enter, "--root", *command], text=True, capture_output=True
        )

    def wait_until_healthy(self) -> None:
        limit = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < limit, self.log()
            children = Path(
                f"/proc/{self.process.pid}/task/{self.process.pid}/children"
            )
            if pids := children.read_text().split():
                self.pid = int(pids[0])
                if self.inside(*self.health).returncode == 0:
                    return
            time.sleep(0.2)

    def status(self) -> dict[str, str]:
        text = Path(f"/proc/{self.pid}/status").read_text()
        return dict(re.findall(r"^(\w+):\s+(.*)$", text, re.MULTILINE))

    def children(self) -> list[str]:
        """Returns the names of the processes that process 1 has to reap."""
        pids = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids]

    def stop(self) -> int:
        os.kill(self.pid, self.signal)
        return self.process.wait(STOP_SECONDS)


def test_the_image_keeps_its_contract(image: dict[str, Any]) -> None:
    config = image["Docker"]["config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["tini", "--", "weftd"]
    assert config["StopSignal"] == "SIGTERM"
    assert set(config["ExposedPorts"]) == {"50051/tcp", "9400/tcp"}
    assert config["Labels"]["org.opencontainers.image.title"] == "weft"


def test_the_image_is_small_and_holds_no_compiler(root: Path) -> None:
    sizes = (
        entry.stat().st_size
        for entry in root.rglob("*")
        if entry.is_file() and not entry.is_symlink()
    )
    assert sum(sizes) < MOST_BYTES
    for name in ("g++", "cmake", "pip", "python3"):
        assert shutil.which(name, path=str(root / "usr" / "bin")) is None, name


def test_it_serves_trains_a_step_and_stops(
    root: Path, image: dict[str, Any], tmp_path: Path
) -> None:
    import models

    state = tmp_path / "state"
    state.mkdir(mode=0o750)
    os.chown(state, 10001, 10001)
    # The image's user can read this copy of the model, but perhaps not the original.
    model = tmp_path / "model"
    shutil.copytree(models.tiny_model("llama-tied"), model)
    for path in (model, *model.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)

    container = Container(root, image, model, state)
    try:
        container.wait_until_healthy()
        assert container.status()["Uid"].split() == ["10001"] * 4
        assert container.status()["NoNewPrivs"] == "1"
        assert int(container.status()["CapBnd"], 16) == 0
        assert container.inside("touch", "/usr/there").returncode != 0
        # What a probe leaves behind does not stay as a zombie.
        container.inside("bash", "-c", "sleep 0.1 & exit")
        time.sleep(2)
        assert container.children() == ["weftd"]
        live = container.inside("weftctl", "health", "--service", "liveness")
        assert live.returncode == 0, live.stderr

        for command in (
            ["adapters", "create", "a", "--rank", "4"],
            ["sample", "--adapter", "a", "--prompt-tokens", "5,6", "--max-tokens", "2"],
            ["checkpoints", "save", "a", "first"],
        ):
            done = container.inside("weftctl", *command)
            assert done.returncode == 0, done.stderr + container.log()
        assert list((state / "checkpoints").rglob("*.safetensors"))
        assert container.stop() == 0, container.log()
    finally:
        container.process.kill()
        container.process.wait()
    lines = [json.loads(line) for line in container.log().splitlines()]
    assert any("draining" in line["msg"] for line in lines), container.log()
