"""Tests that a server without --state-dir keeps what a client of the Tinker API says
about a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

from raw_client import RawClient
from shifted_clock import ShiftedClock
from tinker_daemon import TinkerDaemon

# The engine looks for expired checkpoints several times in this time.
SWEEPS = 60.0


def test_a_time_to_live_ends_a_checkpoint_after_a_restart(tmp_path: Path) -> None:
    tinker = TinkerDaemon(tmp_path, "--state-dir", "")
    client = RawClient(tinker)
    model = client.model(client.session())

    def save(seq: int, name: str, ttl: int | None) -> str:
        asked = client.must(
            "save_weights", model_id=model, seq_id=seq, path=name, ttl_seconds=ttl
        )
        return str(client.result(asked)["path"])

    def listed() -> set[str]:
        _, page = client.ask("checkpoints", method="GET")
        return {found["tinker_path"] for found in page["checkpoints"]}

    paths = {save(1, "brief", 3600), save(2, "set", None), save(3, "kept", 3600)}
    for name, ttl in (("set", 3600), ("kept", None)):
        status, _ = client.ask(
            f"training_runs/{model}/checkpoints/weights/{name}/ttl",
            {"ttl_seconds": ttl},
            method="PUT",
        )
        assert status == 200
    assert listed() == paths
    tinker.server.kill()
    clock = ShiftedClock(tmp_path)
    clock.set(2 * 3600)
    tinker.server.start_with(*clock.launcher)
    with tinker:
        assert listed() == {f"tinker://{model}/weights/kept"}
        folder = tinker.server.checkpoint_dir / model.replace(":", ".")
        end = time.monotonic() + SWEEPS
        while sorted(f.name for f in folder.iterdir()) != ["kept"]:
            assert time.monotonic() < end, list(folder.iterdir())
            time.sleep(0.2)
