"""Tests the Dockerfile and the compose file, as far as possible without a container
engine."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
import yaml
from deploy_files import DEPLOY, ROOT, run, tool

TEXT = (DEPLOY / "Dockerfile").read_text()
INSTRUCTIONS = re.sub(r"\\\n", " ", TEXT)


def test_hadolint_finds_nothing() -> None:
    run(tool("hadolint"), str(DEPLOY / "Dockerfile"))


def copies() -> list[list[str]]:
    """Returns the words of each COPY from the build context."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", INSTRUCTIONS, re.MULTILINE)
    return [line.split() for line in lines]


def test_every_copied_source_exists() -> None:
    assert copies()
    for *sources, _ in copies():
        for source in sources:
            assert (ROOT / source).exists(), source


def test_dockerignore_lets_every_copied_source_through() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    for *sources, _ in copies():
        for source in sources:
            assert source in allowed, source


def test_every_stage_copied_from_is_defined_before() -> None:
    seen: set[str] = set()
    for line in INSTRUCTIONS.splitlines():
        stage = re.match(r"FROM (\S+) AS (\S+)", line)
        if stage:
            assert stage[1] in seen or stage[1].startswith("debian:")
            seen.add(stage[2])
        source = re.match(r"COPY --from=(\S+)", line)
        if source:
            assert source[1] in seen
    assert {"runtime-cpu", "runtime-cuda", "edge"} <= seen


@pytest.mark.parametrize(
    "line",
    [
        "USER 10001:10001",
        "STOPSIGNAL SIGTERM",
        'ENTRYPOINT ["tini", "--", "weftd"]',
        'VOLUME ["/var/lib/weft"]',
        "EXPOSE 50051 9400",
    ],
)
def test_runtime_image_keeps_its_contract(line: str) -> None:
    assert line in TEXT.splitlines()


def test_every_wheel_has_its_version_from_constraints_txt() -> None:
    lines = (DEPLOY / "constraints.txt").read_text().splitlines()
    installs = re.findall(
        r"grep -[EP] '(.+?)' /tmp/constraints.txt +>(\S+) +&& (python3 -m pip .+)",
        INSTRUCTIONS,
    )
    assert len(installs) == INSTRUCTIONS.count("pip install") == 3
    for pattern, chosen, install in installs:
        assert "--no-deps" in install and f"-r {chosen}" in install
        assert any(re.match(pattern, line) for line in lines), pattern
    # setup.sh --tests installs torch with all that it pulls in.
    installed = {found.name for found in importlib.metadata.distributions()}
    of_cuda = {
        line.partition("==")[0] for line in lines if re.match(installs[1][0], line)
    }
    libraries = {name for name in installed if name.startswith("nvidia-")}
    assert of_cuda == libraries | {"torch"} and len(libraries) > 10


def test_compose_mounts_what_exists_and_builds_a_real_target() -> None:
    compose = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    build = compose["services"]["weftd"]["build"]
    assert f"AS {build['target']}" in TEXT
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve().is_file()
    edge = yaml.safe_load((DEPLOY / "docker-compose.edge.yml").read_text())
    assert f"AS {edge['services']['edge']['build']['target']}" in TEXT
    assert edge["services"]["edge"]["network_mode"] == "service:weftd"
    config = Path(compose["services"]["prometheus"]["volumes"][0].split(":")[0])
    assert (DEPLOY / config / "prometheus.yml").is_file()
