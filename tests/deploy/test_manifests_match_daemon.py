"""Flags, WEFT_ variables and ports that deploy/ names are weftd's own."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from deploy_files import DEPLOY, K8S_FOLDERS, ROOT, daemon, render, rendered_objects

# Variables of our scripts and of compose, which weftd does not read.
NOT_THE_DAEMONS = {"WEFT_MODEL_FOLDER", "WEFT_BUILD_DIR", "WEFT_TORCH_DIR"}


@pytest.fixture(scope="module")
def help_text() -> str:
    return subprocess.run(
        [str(daemon()), "--help"], text=True, capture_output=True, check=True
    ).stdout


def flags_of(help_text: str) -> set[str]:
    return set(re.findall(r"--([a-z][a-z-]+)", help_text))


def named_variables() -> set[str]:
    texts = [(DEPLOY / "Dockerfile").read_text(), *map(render, K8S_FOLDERS)]
    texts.append((DEPLOY / "docker-compose.yml").read_text())
    texts.append((DEPLOY / "README.md").read_text())
    names = set(re.findall(r"\bWEFT_[A-Z][A-Z_]*[A-Z]\b", "\n".join(texts)))
    cmake = re.findall(r"-D(WEFT_\w+)", "\n".join(texts))
    return names - NOT_THE_DAEMONS - set(cmake)


def test_every_variable_belongs_to_a_flag(help_text: str) -> None:
    assert len(named_variables()) >= 10
    flags = flags_of(help_text)
    for variable in named_variables():
        flag = variable.removeprefix("WEFT_").lower().replace("_", "-")
        assert flag in flags, variable


def test_every_flag_in_commands_exists(help_text: str) -> None:
    compose = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    command = compose["services"]["weftd"]["command"]
    quickstart = (DEPLOY / "quickstart.sh").read_text()
    start = re.search(r'"\$\{WEFTD\}" (.+?) >"', quickstart, re.DOTALL)
    assert start
    named = set(re.findall(r"--([a-z][a-z-]+)", " ".join(command) + start[1]))
    assert {"model", "checkpoint-dir", "port-file"} <= named
    assert named <= flags_of(help_text)


def test_default_ports_are_those_of_the_manifests(help_text: str) -> None:
    assert "127.0.0.1:50051" in help_text
    assert "127.0.0.1:9400" in help_text
    assert "EXPOSE 50051 9400" in (DEPLOY / "Dockerfile").read_text()
    for folder in K8S_FOLDERS:
        (stateful,) = rendered_objects(folder)["StatefulSet"]
        (container,) = stateful["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"grpc": 50051, "metrics": 9400}


def test_configuration_of_the_manifests_is_accepted(help_text: str) -> None:
    if "--check-config" not in help_text:
        pytest.skip("this weftd has no --check-config")
    for folder in K8S_FOLDERS:
        (config,) = rendered_objects(folder)["ConfigMap"]
        done = subprocess.run(
            [str(daemon()), "--check-config"],
            env={**config["data"]},
            text=True,
            capture_output=True,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
