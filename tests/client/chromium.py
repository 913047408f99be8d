"""A headless Chromium for tests of pages."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
if HAS_PLAYWRIGHT:
    from playwright import sync_api as playwright

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or not HAS_PLAYWRIGHT,
    reason="no Chromium or Playwright: deploy/setup.sh --tests installs them",
)


@contextmanager
def running_chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as library:
        # Chromium's own sandbox does not run as root.
        chromium = library.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()
