"""Tests that the systemd unit is well formed and confined, and that it gives a drain
enough time."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from deploy_files import DEPLOY, ROOT, run

UNIT = DEPLOY / "systemd" / "weftd.service"
UNITS = sorted(UNIT.parent.glob("*.service"))
# The highest exposure level that the service may have, on systemd's scale up to 10.
LEAST_CONFINED = 2.0


def analyze(*words: str) -> str:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine: the unit was NOT verified")
    return run("systemd-analyze", *words)


def settings(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_finds_nothing(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    # The copy starts /bin/true, because weftd may not be installed here.
    copy.write_text(re.sub(r"/opt/weft/\S+", "/bin/true", unit.read_text()))
    assert analyze("verify", "--man=no", "--recursive-errors=no", str(copy)) == ""
    copy.write_text(copy.read_text().replace("LimitNOFILE", "LimitNOFILES"))
    assert "Unknown key" in analyze("verify", "--man=no", str(copy))


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_the_service_is_confined(unit: Path) -> None:
    output = analyze("security", "--offline=true", "--no-pager", str(unit))
    level = re.search(rf"exposure level for {unit.name}: ([\d.]+)", output)
    assert level and float(level[1]) <= LEAST_CONFINED


def test_the_unit_waits_for_the_drain_and_owns_its_state() -> None:
    unit = settings(UNIT)
    environment = settings(DEPLOY / "systemd" / "weftd.env")
    drain = int(environment["WEFT_DRAIN_TIMEOUT_SECONDS"])
    assert int(unit["TimeoutStopSec"]) >= drain + 60
    assert unit["KillSignal"] == "SIGTERM"
    # A weftd whose state another one has taken (4) starts again and stands by.
    source = (ROOT / "server" / "daemon" / "daemon.cc").read_text()
    assert "kExitFenced = 4;" in source
    assert unit["Restart"] == "on-failure"
    assert unit["RestartPreventExitStatus"].split() == ["2"]
    state = Path("/var/lib") / unit["StateDirectory"]
    for name in ("WEFT_CHECKPOINT_DIR", "WEFT_STATE_DIR"):
        assert Path(environment[name]).is_relative_to(state)
    assert unit["EnvironmentFile"] == "/etc/weft/weftd.env"
