"""Helpers of the deploy tests: paths, rendered manifests, and calls of tools."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
K8S = DEPLOY / "k8s"
OVERLAYS = tuple(
    sorted(path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml"))
)
# Combinations of components that no overlay has.
MIXES = (
    "gpu durable",
    "edge mtls monitoring",
    "gpu edge mtls durable monitoring group",
    "monitoring standby",
)
MANIFESTS = OVERLAYS + MIXES


def tool(name: str) -> str:
    """Returns the path of a program that deploy/setup.sh --tests installs, or of
    kubectl.

    No package of Debian 12 has a kubectl that is new enough for the kustomizations. So
    the test is skipped without kubectl. Any other missing program is a failure.
    """
    path = ROOT / ".venv" / "bin" / name
    found = str(path) if path.exists() else shutil.which(name)
    if found is None and name == "kubectl":
        pytest.skip("kubectl is not installed: manifests were NOT rendered")
    assert found is not None, f"{name} is missing: run deploy/setup.sh --tests"
    return found


def run(*command: str, cwd: Path = ROOT) -> str:
    """Returns the output of a command that must succeed."""
    done = subprocess.run(
        command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


def kustomize(folder: Path) -> str:
    """Returns what kubectl makes of a kustomization."""
    return run(tool("kubectl"), "kustomize", str(folder))


@functools.cache
def render(name: str) -> str:
    """Returns the objects of an overlay, or of the base with the named components."""
    if name in OVERLAYS:
        return kustomize(K8S / "overlays" / name)
    with tempfile.TemporaryDirectory() as folder:
        # Kustomize refuses absolute paths.
        root = Path(os.path.relpath(K8S, folder))
        text = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [str(root / "base")],
            "components": [str(root / "components" / part) for part in name.split()],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(text))
        return kustomize(Path(folder))


@functools.cache
def rendered_objects(name: str) -> dict[str, list[dict[str, Any]]]:
    """Returns the rendered objects by kind. All callers share them, so none may change
    them."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for item in yaml.load_all(render(name), yaml.CSafeLoader):
        kinds.setdefault(item["kind"], []).append(item)
    return kinds


def by_name(name: str, kind: str) -> dict[str, dict[str, Any]]:
    """Returns the rendered objects of a kind by name."""
    objects = rendered_objects(name).get(kind, [])
    return {item["metadata"]["name"]: item for item in objects}


def pod(name: str) -> dict[str, Any]:
    """Returns the spec of the pod that serves: weftd's, or rank 0's of a group."""
    kinds = rendered_objects(name)
    if "LeaderWorkerSet" in kinds:
        (group,) = kinds["LeaderWorkerSet"]
        template = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    elif "StatefulSet" in kinds:
        (stateful,) = kinds["StatefulSet"]
        template = stateful["spec"]["template"]
    else:
        template = by_name(name, "Deployment")["weftd"]["spec"]["template"]
    spec: dict[str, Any] = template["spec"]
    return spec


def configuration(name: str) -> dict[str, str]:
    """Returns weftd's environment variables."""
    (config,) = (
        item
        for item in rendered_objects(name)["ConfigMap"]
        if item["metadata"]["name"].startswith("weftd-config-")
    )
    data: dict[str, str] = config["data"]
    return data


def has_standby(name: str) -> bool:
    """Returns whether the state is in a store, and a second pod stands by."""
    return "weftd" in by_name(name, "Deployment")


def built(program: str) -> Path:
    """Returns the path of a program of the build. Skips the test if the program is
    missing."""
    build = Path(os.environ.get("WEFT_BUILD_DIR", ROOT / "build" / "cpu"))
    path = build / program
    if not path.exists():
        pytest.skip(f"{path} is not built: flags and ports were NOT checked")
    return path


def daemon() -> Path:
    return built("server/weftd")


def weftctl() -> Path:
    return built("client/weftctl/weftctl")
