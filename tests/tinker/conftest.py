"""The fixture of the tests that need the Tinker SDK."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tinker_daemon import TinkerDaemon
from tinker_sdk import SDK


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerDaemon]:
    if not SDK.exists():
        pytest.skip("no Tinker SDK: deploy/setup.sh --tests installs it")
    tinker = TinkerDaemon(
        tmp_path_factory.mktemp("tinker"), "--max-data-per-request", "4"
    )
    yield tinker
    tinker.stop()
