"""Daemons are killed and frozen under load, and nothing is lost or done twice. Clients
of the Python package and of the Tinker SDK repeat what fails, and end with the bits of
a run without disturbances."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import daemon as daemon_module
import models
import pytest
import stores
import tinker_sdk
from chaos import Chaos
from daemon import wait_until
from door import Door
from durable import KIND
from members import Fleet
from sdk_process import END, SdkClient
from trainers import FLAGS, Trainer, running

import weft

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)


def ends(trainers: list[Trainer], client: Any, folder: Path) -> dict[str, bytes]:
    """Saves all adapters, and returns their weights, gradients and moments. The Tinker
    API has named its adapter itself."""
    for trainer in trainers:
        client.adapter(trainer.adapter_id).save(END, overwrite=True)
    names = {trainer.adapter_id for trainer in trainers}
    found = {}
    for one in client.checkpoints():
        if one.name != END:
            continue
        who = one.adapter_id if one.adapter_id in names else "sdk"
        client.download_checkpoint(one.adapter_id, END, folder / who)
        for file in (folder / who).glob("*.safetensors"):
            found[f"{who}/{file.name}"] = file.read_bytes()
    return found


def calm_ends(
    folder: Path, struck: list[Trainer], sdk: SdkClient | None
) -> dict[str, bytes]:
    """Returns what the same requests make of a daemon that nothing disturbs."""
    front = f"127.0.0.1:{daemon_module.free_port()}"
    flags = (*FLAGS, "--tinker-listen", front, "--model-name", "toy")
    server = daemon_module.Daemon(models.tiny_model(KIND), folder, *flags)
    never = threading.Event()
    with server, ThreadPoolExecutor(len(struck)) as pool:
        trainers = [Trainer(trainer.index) for trainer in struck]
        rounds = [trainer.rounds for trainer in struck]
        if sdk is not None:
            again = SdkClient(f"http://{front}", folder / "sdk", sdk.rounds)
        for one in [
            pool.submit(trainer.run, server.address, never, count)
            for trainer, count in zip(trainers, rounds, strict=True)
        ]:
            one.result()
        if sdk is not None:
            again.expect_success()
        with server.client() as client:
            return ends(trainers, client, folder / "ends")


@pytest.mark.parametrize("logs", [1, 2])
def test_nothing_is_lost_or_done_twice(
    fleet: Fleet, logs: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    option = request.config.getoption
    begin = time.monotonic()
    flags = [*FLAGS, "--model-name", "toy", "--snapshot-log-bytes", "100000"]
    with Door() as door:
        chaos = Chaos(fleet, logs, door, option("--seed"), *flags)
        chaos.wait_for_service()
        sdk = None
        if tinker_sdk.SDK.exists():
            sdk = SdkClient(door.url, tmp_path / "sdk")
        trainers = [Trainer(i) for i in range(option("--clients") - (sdk is not None))]

        def steps() -> int:
            return sum(trainer.steps for trainer in trainers)

        def report(what: str) -> None:
            rounds = sdk.rounds if sdk else 0
            print(
                f"{time.monotonic() - begin:6.1f} s {dict(chaos.events)},"
                f" {steps()} steps and {rounds} rounds of the SDK: {what}",
                flush=True,
            )
            if sdk is not None:
                sdk.expect_running()

        try:
            # The SDK takes seconds to start, and far longer beside the others.
            wait_until(lambda: sdk is None or sdk.rounds > 0)
            with running(chaos.addresses, trainers):
                wait_until(lambda: min(t.rounds for t in trainers) > 0)
                chaos.run(option("--kills"), option("--zombies"), steps, report)
            if sdk is not None:
                sdk.stop()
        finally:
            if sdk is not None:
                sdk.kill()
        owners = chaos.wait_for_service()
        for owner in owners:
            owner.wait_for("serving")
            owner.wait_until_restored()
        epochs = sum(int(owner.value("weft_state_epoch")) for owner in owners)
        with weft.Client(chaos.addresses) as client:
            for trainer in trainers:
                trainer.check(client)
            found = ends(trainers, client, tmp_path / "ends")
            for trainer in trainers:
                trainer.check_saves(client)
    seconds = time.monotonic() - begin
    calm = calm_ends(tmp_path / "calm", trainers, sdk)
    assert sorted(found) == sorted(calm)
    assert [name for name in calm if found[name] != calm[name]] == []
    print(
        f"{chaos.events['kills']} kills, {chaos.events['zombies']} zombies,"
        f" {epochs - logs} take-overs of {logs} logs in {seconds:.0f} s: {steps()}"
        f" steps of {len(trainers)} gRPC clients and {sdk.rounds if sdk else 0} rounds"
        f" of the Tinker SDK, each once; {sum(t.samples for t in trainers)} samples;"
        f" {sum(len(t.saves) for t in trainers)} checkpoints read; the slowest round"
        f" {max(t.slowest for t in trainers):.1f} s; a log had no server for at most"
        f" {chaos.longest:.1f} s; all bits as without disturbances"
    )
