"""Daemons with the Tinker API, and the SDK in its own environment."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "oracle"), str(ROOT / "client" / "python")]

import daemon  # noqa: E402
import models  # noqa: E402
import tinker_sdk  # noqa: E402
from tinker_sdk import SDK  # noqa: E402

BUILD_DIR = daemon.BUILD_DIR
WEFTCTL = BUILD_DIR / "client" / "weftctl" / "weftctl"
SCRIPT = Path(__file__).with_name("sdk_script.py")


class TinkerDaemon:
    """weftd with a toy model. `url` stays the same across restarts."""

    # Its start takes two seconds, because the SDK imports torch.
    _sdk: ClassVar[subprocess.Popen[str] | None] = None

    def __init__(self, folder: Path, *flags: str) -> None:
        port = daemon.free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.state = folder / "state"
        self.server = daemon.Daemon(
            models.tiny_model("llama-untied"),
            folder / "run",
            *("--model-name", "toy"),
            *("--tinker-listen", f"127.0.0.1:{port}", "--threads", "1"),
            *("--state-dir", str(self.state)),
            *flags,
        )
        self.server.start()
        # The URL that the SDK uses. A test may replace it with a proxy's URL.
        self.sdk_url = self.url

    def __enter__(self) -> TinkerDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def begin(self, name: str) -> None:
        """Starts a program of sdk_script.py, in a process that all servers share."""
        if self._sdk is None:
            TinkerDaemon._sdk = subprocess.Popen(
                [str(SDK), str(SCRIPT), "toy"],
                env=tinker_sdk.environment(self.sdk_url),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._sdk is not None and self._sdk.stdin is not None
        self._sdk.stdin.write(f"{name} {self.sdk_url}\n")
        self._sdk.stdin.flush()

    def next_line(self) -> str:
        """Returns the program's next line."""
        assert self._sdk is not None and self._sdk.stdout is not None
        line = self._sdk.stdout.readline().strip()
        if not line:
            TinkerDaemon._sdk = None
        assert line, "the program has ended"
        return line

    def result(self) -> Any:
        """Returns the program's result, which is its last line."""
        line = self.next_line()
        assert line.startswith("result "), line
        return json.loads(line.removeprefix("result "))

    def run(self, name: str) -> Any:
        self.begin(name)
        return self.result()

    def stop(self) -> None:
        self.server.stop()


@atexit.register
def end_sdk() -> None:
    if TinkerDaemon._sdk is not None:
        TinkerDaemon._sdk.kill()
        TinkerDaemon._sdk.communicate()
