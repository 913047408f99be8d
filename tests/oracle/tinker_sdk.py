"""The Tinker SDK, which has a Python environment of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping

import daemon

SDK = daemon.REPOSITORY / "build" / "tinker-venv" / "bin" / "python"


def environment(
    url: str, key: str = "tml-any", base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns `base` with what the SDK reads in a process that uses the server at
    `url`."""
    return {
        **base,
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": key,
        "TINKER_TELEMETRY": "0",
        "PYTHONPATH": "",
    }
