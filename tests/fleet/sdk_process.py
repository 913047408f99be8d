"""Runs sdk_client.py."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import tinker_sdk

END = "end"
# The SDK repeats what fails for five minutes, with long pauses.
SDK_SECONDS = 300.0


class SdkClient:
    """A program that trains with the Tinker SDK, if that is installed."""

    def __init__(
        self,
        url: str,
        folder: Path,
        rounds: int = -1,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """`more` is a part of the program's environment."""
        self._folder = folder
        folder.mkdir()
        script = Path(__file__).with_name("sdk_client.py")
        environment = {**tinker_sdk.environment(url), **(more or {})}
        environment["PYTHONPATH"] = str(script.parents[1] / "tinker")
        command = [str(tinker_sdk.SDK), str(script), "toy", str(folder), END]
        with (folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [*command, str(rounds)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def rounds(self) -> int:
        file = self._folder / f"{END}.rounds"
        return int(file.read_text()) if file.exists() else 0

    def expect_running(self) -> None:
        assert self._process.poll() is None, self._output()

    def stop(self) -> None:
        """Lets the program end after its round."""
        (self._folder / "stop").touch()
        self.expect_success()

    def expect_success(self) -> None:
        assert self._process.wait(SDK_SECONDS) == 0, self._output()

    def _output(self) -> str:
        return (self._folder / "output").read_text()[-3000:]
