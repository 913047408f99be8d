"""What the deploy tests share: where things are, and how to run a tool."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
K8S_FOLDERS = ("base", "overlays/dev-cpu")


def tool(name: str) -> str:
    """Path of a program that deploy/setup.sh --tests installs, or of kubectl.

    Debian 12 has no kubectl that knows today's kustomizations, so without one
    the test skips; anything else that is missing is a failure.
    """
    path = ROOT / ".venv" / "bin" / name
    found = str(path) if path.exists() else shutil.which(name)
    if found is None and name == "kubectl":
        pytest.skip("kubectl is not installed: manifests were NOT rendered")
    assert found is not None, f"{name} is missing: run deploy/setup.sh --tests"
    return found


def run(*command: str, cwd: Path = ROOT) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(
        command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


@functools.cache
def render(folder: str) -> str:
    """What `kubectl kustomize` makes of a folder under deploy/k8s."""
    return run(tool("kubectl"), "kustomize", str(DEPLOY / "k8s" / folder))


def rendered_objects(folder: str) -> dict[str, list[dict[str, Any]]]:
    """The rendered objects by kind."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for item in yaml.safe_load_all(render(folder)):
        kinds.setdefault(item["kind"], []).append(item)
    return kinds


def daemon() -> Path:
    """Path of weftd; the test skips, and says so, when it was not built."""
    build = Path(os.environ.get("WEFT_BUILD_DIR", ROOT / "build" / "cpu"))
    path = build / "server" / "weftd"
    if not path.exists():
        pytest.skip(f"{path} is not built: flags and ports were NOT checked")
    return path
