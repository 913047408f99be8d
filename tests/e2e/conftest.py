"""The fixtures of tests/oracle, the folder beside this one."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ORACLE = Path(__file__).resolve().parents[1] / "oracle"
sys.path.insert(0, str(_ORACLE))
sys.path.append(str(_ORACLE.parent / "client"))

# Entries run beside each other, and a second thread for a tiny model takes more time
# to wake than it saves. Daemons of the whole demo model have all cores.
os.environ.setdefault("WEFT_THREADS", "1")

# The conftest.py of tests/oracle is loaded as "fixtures", because the name is taken.
_spec = importlib.util.spec_from_file_location("fixtures", _ORACLE / "conftest.py")
assert _spec is not None and _spec.loader is not None
fixtures = importlib.util.module_from_spec(_spec)
sys.modules["fixtures"] = fixtures
_spec.loader.exec_module(fixtures)

daemon_for = fixtures.daemon_for
reference_for = fixtures.reference_for
unique = fixtures.unique
pytest_configure = fixtures.pytest_configure
pytest_collection_modifyitems = fixtures.pytest_collection_modifyitems
pytest_runtest_makereport = fixtures.pytest_runtest_makereport

from durable import Durable  # noqa: E402  Needs the path that is set above.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", default=16.0, type=float, help="of test_storm.py")
    away = "seconds without a server in test_outage.py"
    parser.addoption("--away", default=45.0, type=float, help=away)


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Durable]:
    server = Durable(tmp_path)
    yield server
    if server.daemon is not None:
        server.daemon.kill()
