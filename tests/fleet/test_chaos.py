"""Daemons are killed and frozen under load, while adapters move between their logs, and
nothing is lost or done twice. Clients of the Python package and of the Tinker SDK
repeat what fails, and end with the bits of a run without disturbances."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
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
from stores import Store
from trainers import FLAGS, Mover, Trainer, running

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
    with server, ThreadPoolExecutor(len(struck) + 1) as pool:
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


@dataclass
class Form:
    """How much happens, by default in the short form for so many logs."""

    logs: int
    kills: int
    zombies: int
    moves: int
    daemons: int = 0  # 0: one more than logs.

    def __str__(self) -> str:
        return str(self.logs)


SHORT = [Form(1, 10, 4, 0), Form(3, 5, 2, 10)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "form" not in metafunc.fixturenames:
        return
    names = [field.name for field in fields(Form)]
    given = {name: metafunc.config.getoption(f"--{name}") for name in names}
    given = {name: count for name, count in given.items() if count is not None}
    forms = [form for form in SHORT if given.get("logs", form.logs) == form.logs]
    forms = [replace(form, **given) for form in forms or SHORT[-1:]]
    metafunc.parametrize("form", forms, ids=str)


def test_nothing_is_lost_or_done_twice(
    fleet: Fleet,
    seaweedfs: Store,
    form: Form,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    option = request.config.getoption
    begin = time.monotonic()
    flags = [*FLAGS, "--model-name", "toy", "--snapshot-log-bytes", "100000"]
    with Door() as door:
        chaos = Chaos(
            fleet, form.logs, door, option("--seed"), *flags, daemons=form.daemons
        )
        chaos.wait_for_service()
        sdk = None
        if tinker_sdk.SDK.exists():
            sdk = SdkClient(door.url, tmp_path / "sdk")
        trainers = [Trainer(i) for i in range(option("--clients") - (sdk is not None))]
        names = [trainer.adapter_id for trainer in trainers]
        movers = [
            Mover(names, form.logs, option("--seed") + i)
            for i in range(form.logs if form.moves else 0)
        ]

        def steps() -> int:
            return sum(trainer.steps for trainer in trainers)

        def moves() -> Counter[str]:
            return sum((mover.ends for mover in movers), Counter())

        def report(what: str) -> None:
            rounds = sdk.rounds if sdk else 0
            print(
                f"{time.monotonic() - begin:6.1f} s {dict(chaos.events)},"
                f" moves {dict(moves())},"
                f" {steps()} steps and {rounds} rounds of the SDK: {what}",
                flush=True,
            )
            if sdk is not None:
                sdk.expect_running()

        try:
            # The SDK takes seconds to start, and far longer beside the others.
            wait_until(lambda: sdk is None or sdk.rounds > 0)
            with running(chaos.addresses, trainers), ExitStack() as more:
                wait_until(lambda: min(t.rounds for t in trainers) > 0)
                for mover in movers:
                    more.enter_context(running(chaos.addresses, [mover]))
                chaos.run(form.kills, form.zombies, steps, report)
                while (before := moves()["moved"]) < form.moves:
                    chaos.wait_until(lambda: moves()["moved"] > before)
            if sdk is not None:
                sdk.stop()
        finally:
            if sdk is not None:
                sdk.kill()
        owners = chaos.wait_for_service()
        for owner in owners:
            owner.wait_for("serving")
            owner.wait_until_restored()
        # Also a move whose call has failed ends.
        wait_until(lambda: seaweedfs.sizes(fleet.url, "arrivals/") == {})
        epochs = sum(int(owner.value("weft_state_epoch")) for owner in owners)
        with weft.Client(chaos.addresses) as client:
            for trainer in trainers:
                trainer.check(client)
                having = [o for o in owners if o.facts(trainer.adapter_id).code == "OK"]
                assert len(having) == 1, trainer.adapter_id
            found = ends(trainers, client, tmp_path / "ends")
            for trainer in trainers:
                trainer.check_saves(client)
    seconds = time.monotonic() - begin
    calm = calm_ends(tmp_path / "calm", trainers, sdk)
    assert sorted(found) == sorted(calm)
    assert [name for name in calm if found[name] != calm[name]] == []
    moved = moves()["moved"]
    print(
        f"{chaos.events['kills']} kills, {chaos.events['zombies']} zombies,"
        f" {moved} moves ({moves().total() - moved} more failed),"
        f" {epochs - form.logs} take-overs of {form.logs} logs by"
        f" {len(chaos.members)} daemons in {seconds:.0f} s: {steps()} steps of"
        f" {len(trainers)} gRPC clients and"
        f" {sdk.rounds if sdk else 0} rounds of the Tinker SDK, each once;"
        f" {sum(t.samples for t in trainers)} samples;"
        f" {sum(len(t.saves) for t in trainers)} checkpoints read; the slowest round"
        f" {max(t.slowest for t in trainers):.1f} s; a log had no server for at most"
        f" {chaos.longest:.1f} s; all bits as without disturbances"
    )
