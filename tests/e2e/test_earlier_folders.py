"""Tests that weftd goes on from the folders of earlier releases (make_folders.py)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import daemon as daemon_module
import grpc
import numpy as np
import pytest
from make_folders import EARLIER, TOKENS, logprobs

import weft
from weft._proto import training_pb2

RELEASES = sorted(path.name for path in EARLIER.iterdir())
TOLERANCE = 1e-5  # Processors differ in their last bits.


def repeat_the_last_update(address: str) -> None:
    """Repeats the release's last OptimStep, as a client does whose answer was lost."""
    request = training_pb2.OptimStepRequest(
        adapter_id="poet", step=8, adamw=training_pb2.AdamWConfig(learning_rate=1e-2)
    )
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            "/weft.v1.TrainingService/OptimStep",
            request_serializer=training_pb2.OptimStepRequest.SerializeToString,
            response_deserializer=training_pb2.OptimStepResponse.FromString,
        )
        reply, made = call.with_call(request, timeout=60)
    assert ("weft-replayed", "1") in made.trailing_metadata()
    assert reply.version > 0


@pytest.mark.parametrize(
    "release", [name for name in RELEASES if name != "__pycache__"]
)
def test_goes_on_from_the_folders_of_a_release(release: str, tmp_path: Path) -> None:
    folder = tmp_path / release
    shutil.copytree(EARLIER / release, folder)
    expected = json.loads((folder / "expected.json").read_text())
    server = daemon_module.Daemon(
        folder / "model",
        tmp_path / "run",
        *("--state-dir", str(folder / "state")),
        *("--checkpoint-dir", str(folder / "checkpoints")),
        "--load-format=dummy",
    )
    with server:
        with server.client() as client:
            adapter = client.adapter("poet")
            info = adapter.info()
            assert info.next_step == expected["next_step"]
            assert info.optim_steps == expected["optim_steps"]
            assert list(info.snapshots) == expected["snapshots"]
            repeat_the_last_update(server.address)
            now = logprobs(adapter)
            np.testing.assert_allclose(now, expected["logprobs"], atol=TOLERANCE)
            adapter.forward_backward([weft.Datum.next_token(TOKENS)])
            adapter.optim_step(learning_rate=1e-2)
            adapter.load("second")
            now = logprobs(adapter)
            np.testing.assert_allclose(now, expected["saved_logprobs"], atol=TOLERANCE)
        weftctl = daemon_module.BUILD_DIR / "client" / "weftctl" / "weftctl"
        command = [str(weftctl), "state", "snapshot", "--server", server.address]
        subprocess.run(command, check=True, timeout=60)
    assert list((folder / "state").glob("SNAPSHOT-*"))
