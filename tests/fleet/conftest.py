"""The fixtures of tests/e2e, the folder beside this one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(_TESTS / "e2e"), str(_TESTS / "tinker")]
# The conftest.py of tests/e2e is loaded as "e2e", because the name is taken.
_spec = importlib.util.spec_from_file_location("e2e", _TESTS / "e2e" / "conftest.py")
assert _spec is not None and _spec.loader is not None
e2e = importlib.util.module_from_spec(_spec)
sys.modules["e2e"] = e2e
_spec.loader.exec_module(e2e)

pytest_configure = e2e.pytest_configure
pytest_collection_modifyitems = e2e.pytest_collection_modifyitems
pytest_runtest_makereport = e2e.pytest_runtest_makereport
durable = e2e.durable

import stores  # noqa: E402  Needs the path that is set above.
from members import Fleet  # noqa: E402
from objects import Objects  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    away = "seconds without a store in test_outage.py"
    parser.addoption("--away", default=12.0, type=float, help=away)
    for name in ("kills", "zombies", "moves", "logs", "daemons"):
        parser.addoption(f"--{name}", type=int, help="of test_chaos.py")
    for name, count in (("clients", 8), ("seed", 7)):
        parser.addoption(f"--{name}", default=count, type=int, help="of test_chaos.py")


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Store]:
    with stores.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as store:
        yield store


@pytest.fixture(scope="session")
def objects(seaweedfs: stores.Store) -> Iterator[Objects]:
    with Objects(seaweedfs) as made:
        yield made


@pytest.fixture
def fleet(tmp_path: Path, seaweedfs: stores.Store) -> Iterator[Fleet]:
    """Daemons that share one prefix of a SeaweedFS."""
    with Fleet(tmp_path, seaweedfs.url, seaweedfs.environment()) as made:
        yield made


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Store]:
    with stores.moto(tmp_path_factory.mktemp("moto")) as store:
        yield store
