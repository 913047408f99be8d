"""Tests that flags, WEFT_ variables and ports in deploy/ exist in weftd."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from deploy_files import (
    DEPLOY,
    K8S,
    OVERLAYS,
    ROOT,
    configuration,
    daemon,
    has_standby,
    pod,
    render,
)

# Variables of the scripts, of compose and of clients, which weftd does not
# read.
NOT_THE_DAEMONS = {
    "WEFT_MODEL_FOLDER",
    "WEFT_EDGE_FOLDER",
    "WEFT_BUILD_DIR",
    "WEFT_TORCH_DIR",
}
NOT_THE_DAEMONS |= {"WEFT_SERVER", "WEFT_TOKEN", "WEFT_TOKEN_FILE", "WEFT_TLS"}
NOT_THE_DAEMONS |= {"WEFT_CA", "WEFT_CLIENT_CERT", "WEFT_CLIENT_KEY"}
NOT_THE_DAEMONS |= {"WEFT_SERVER_NAME"}


@pytest.fixture(scope="module")
def help_text() -> str:
    return subprocess.run(
        [str(daemon()), "--help"], text=True, capture_output=True, check=True
    ).stdout


def flags_of(help_text: str) -> set[str]:
    return set(re.findall(r"--([a-z][a-z-]+)", help_text))


def flag_of(variable: str) -> str:
    return variable.removeprefix("WEFT_").lower().replace("_", "-")


def variables_of(component: str) -> set[str]:
    """Returns the variables that a component sets."""
    text = (K8S / "components" / component / "kustomization.yaml").read_text()
    return set(re.findall(r"- (WEFT_\w+)=", text))


def named_variables() -> set[str]:
    files = [
        "Dockerfile",
        "docker-compose.yml",
        "docker-compose.edge.yml",
        "docker-compose.standby.yml",
        "systemd/weftd.env",
        "systemd/weftd.service",
    ]
    paths = [*(DEPLOY / name for name in files), *DEPLOY.rglob("*.md")]
    texts = [*(path.read_text() for path in paths), *map(render, OVERLAYS)]
    names = set(re.findall(r"\bWEFT_[A-Z][A-Z_]*[A-Z]\b", "\n".join(texts)))
    cmake = re.findall(r"-D(WEFT_\w+)", "\n".join(texts))
    return names - NOT_THE_DAEMONS - set(cmake)


def test_every_variable_belongs_to_a_flag(help_text: str) -> None:
    assert len(named_variables()) >= 10
    flags = flags_of(help_text)
    for variable in named_variables():
        assert flag_of(variable) in flags, variable


@pytest.mark.parametrize("component", ["gpu", "edge", "durable", "standby"])
def test_variables_of_a_component_belong_to_flags(
    component: str, help_text: str
) -> None:
    for variable in variables_of(component):
        assert flag_of(variable) in flags_of(help_text), variable


def test_every_flag_in_commands_exists(help_text: str) -> None:
    compose = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    command = compose["services"]["weftd"]["command"]
    script = (DEPLOY / "start.sh").read_text()
    start = re.search(r'server/weftd" (.+?) <', script, re.DOTALL)
    assert start
    named = set(re.findall(r"--([a-z][a-z-]+)", " ".join(command) + start[1]))
    assert {"model", "checkpoint-dir", "port-file"} <= named
    assert named <= flags_of(help_text)


def rows(page: str) -> str:
    """Returns the tables of a page, whose flags are weftd's."""
    lines = (DEPLOY / page).read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def test_every_flag_in_the_tables_of_limits_and_memory_exists(help_text: str) -> None:
    for page in ("limits.md", "memory.md"):
        named = flags_of(rows(page))
        assert len(named) >= 10
        assert named <= flags_of(help_text), named - flags_of(help_text)


def test_every_reason_of_a_limit_is_one_that_the_server_gives() -> None:
    named = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", rows("limits.md")))
    sources = [path for top in ("src", "server") for path in (ROOT / top).rglob("*.cc")]
    given = "\n".join(path.read_text() for path in sources)
    for reason in named - {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}:
        assert f'"{reason}"' in given, reason


def test_default_ports_are_those_of_the_manifests(help_text: str) -> None:
    assert "127.0.0.1:50051" in help_text
    assert "127.0.0.1:9400" in help_text
    assert "EXPOSE 50051 9400" in (DEPLOY / "Dockerfile").read_text()
    for name in OVERLAYS:
        (container,) = pod(name)["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"grpc": 50051, "metrics": 9400}


# A small model for a start that is only checked.
MODEL = ROOT / "tests" / "e2e" / "earlier" / "0.2-start" / "model"


def check_config(
    variables: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Checks the settings with a model, tokens and folders that exist here. The device
    of the manifests need not."""
    own = {"WEFT_MODEL": str(MODEL), "WEFT_LOAD_FORMAT": "dummy"}
    for name in ("WEFT_CHECKPOINT_DIR", "WEFT_STATE_DIR", "WEFT_SPILL_DIR"):
        if variables.get(name):
            assert variables[name].startswith("/var/lib/weft/")
            own[name] = str(folder / name)
    if "WEFT_AUTH_TOKENS_FILE" in variables:
        (folder / "tokens").touch()
        own["WEFT_AUTH_TOKENS_FILE"] = str(folder / "tokens")
    is_cpu = variables.get("WEFT_DEVICE") == "cpu"
    device = () if is_cpu else ("--device-memory-bytes=80GiB",)
    return subprocess.run(
        [str(daemon()), "--check-config", *device],
        env={**variables, **own},
        text=True,
        capture_output=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize("name", OVERLAYS)
def test_configuration_of_the_manifests_is_accepted(name: str, tmp_path: Path) -> None:
    variables = dict(configuration(name))
    if has_standby(name):
        # What the pod's fields and the Secret weftd-store have.
        variables["WEFT_INSTANCE"] = "weftd-5f7d9c6b8-x2k4p"
        variables["WEFT_ADVERTISE_ADDRESS"] = "10.0.0.7:50051"
        variables["WEFT_STATE"] = (tmp_path / "store").as_uri()
    done = check_config(variables, tmp_path)
    assert done.returncode == 0, done.stderr


def test_configuration_of_the_unit_is_accepted(tmp_path: Path) -> None:
    lines = (DEPLOY / "systemd" / "weftd.env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    done = check_config(variables, tmp_path)
    assert done.returncode == 0, done.stderr
