"""The object store goes away under load. No process ends, samples are answered
meanwhile, training goes on by itself, and no step is lost or done twice."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import stores
from daemon import BUILD_DIR, free_port, wait_until
from durable import VOCAB
from fault_proxy import FaultProxy
from members import Fleet, Member, pair
from raw_client import RawClient
from texts import next_token, random_tokens
from trainers import FLAGS, RETRY, TOKENS, Sampler, Trainer, running

import weft

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)

TRAINERS = 3
# A request to the store is repeated for 10 seconds (s3_client.h), and then the log
# says that it is stalled.
REQUEST_SECONDS = 10.0
WEFTCTL = BUILD_DIR / "client" / "weftctl" / "weftctl"
# A sample waits for no store, but for its turn beside the trainers' and for the cores
# of a machine that has other work.
SAMPLE_SECONDS = 3.0


def reason_of_refusal(member: Member) -> str:
    """Returns why a new step is refused."""
    with weft.Client(member.address, timeout=5, retry=weft.NO_RETRY) as client:
        with pytest.raises(weft.WeftError) as refused:
            client.adapter("probe").optim_step(learning_rate=1e-2)
        return refused.value.reason


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_training_goes_on_after_the_store_was_away(
    fleet: Fleet, seaweedfs: stores.Store, how: str, request: pytest.FixtureRequest
) -> None:
    away = float(request.config.getoption("--away"))
    owner, standby = pair(fleet, *FLAGS)
    trainers = [Trainer(index) for index in range(TRAINERS)]
    with owner.client() as client:
        client.create_adapter("probe", rank=2)
    sampler = Sampler("probe")
    with running(f"{owner.address},{standby.address}", [*trainers, sampler]):
        wait_until(lambda: min(t.rounds for t in trainers) > 2)
        getattr(seaweedfs, how)()
        begin = time.monotonic()
        stalls = away > REQUEST_SECONDS
        if stalls:
            wait_until(lambda: owner.value("weft_journal_stalled") == 1)
            stalled = time.monotonic() - begin
            assert reason_of_refusal(owner) == "STATE_STORE_UNREACHABLE"
        else:
            assert owner.value("weft_journal_stalled") == 0
        time.sleep(max(0.0, begin + away - time.monotonic()))
        end = time.monotonic()
        rounds = [t.rounds for t in trainers]
        seaweedfs.start() if how == "kill" else seaweedfs.thaw()
        back = time.monotonic()
        wait_until(
            lambda: all(t.rounds > n + 2 for t, n in zip(trainers, rounds, strict=True))
        )
        seconds = time.monotonic() - back
    print(
        f"\n{how}: away {end - begin:.1f} s"
        + (f", stalled after {stalled:.1f} s" if stalls else "")
        + f"; longest pause of samples {sampler.longest_pause(begin, end):.2f} s;"
        f" rounds {rounds} before and {[t.rounds for t in trainers]} after;"
        f" training again {seconds:.1f} s after the store"
    )
    assert sampler.longest_pause(begin, end) < SAMPLE_SECONDS
    assert owner.value("weft_journal_stalled") == 0
    assert owner.value("weft_state_epoch") == 1, "the standby took a living log"
    assert standby.wait_for("standby")
    # What a start finds is what was acknowledged.
    owner.kill()
    owner.launch()
    owner.wait_for("serving")
    owner.wait_until_restored()
    with owner.client() as client:
        for trainer in trainers:
            trainer.check(client)


def learn(adapter: Any, seed: int, *loss: Any, **teacher: Any) -> None:
    rows = [next_token(random_tokens(VOCAB, TOKENS + 1, seed))]
    adapter.forward_backward(rows, *loss, **teacher)
    adapter.optim_step(learning_rate=1e-2)


def counts(client: Any, name: str) -> tuple[int, int]:
    info = client.adapter(name).info()
    return info.next_step - 1, info.optim_steps


def write_snapshot(member: Member) -> None:
    command = (str(WEFTCTL), "state", "snapshot", "--server", member.address)
    subprocess.run(command, check=True, timeout=60)


@dataclass
class Front:
    url: str


class ColdOwner:
    """A daemon that has just started. The tensors of its adapters are in the store."""

    def __init__(self, fleet: Fleet, *flags: str) -> None:
        front = f"127.0.0.1:{free_port()}"
        tinker = ("--tinker-listen", front, "--model-name", "toy")
        self.member = fleet.add("a", *FLAGS, *tinker, *flags)
        self.member.wait_for("serving")
        self.tinker = RawClient(Front(f"http://{front}"))
        self.model = self.tinker.model(self.tinker.session())
        self.seq = 0
        self.learn_by_tinker()
        with self.member.client() as client:
            for seed, name in enumerate(("hot", "cold", "student", "teacher")):
                learn(client.create_adapter(name, rank=4, seed=seed), seed)
            loader = client.create_adapter("loader", rank=4, seed=9)
            learn(loader, 9)
            loader.save("kept")
        write_snapshot(self.member)
        self.restart()

    def restart(self) -> None:
        self.member.kill()
        self.member.launch()
        self.member.wait_for("serving")
        self.member.wait_until_restored()

    def learn_by_tinker(self) -> None:
        self.seq += 2
        trained = self.tinker.train(self.model, self.seq - 1)
        updated = self.tinker.step(self.model, self.seq)
        self.tinker.result(trained)
        assert self.tinker.norm(updated) > 0

    def work(self) -> list[Callable[[Any], object]]:
        """Work that needs what is in the store: steps, a teacher, a load, a sample."""
        return [
            lambda client: learn(client.adapter("cold"), 11),
            lambda client: learn(
                client.adapter("student"),
                12,
                "forward_kl",
                teacher=weft.Teacher("teacher"),
            ),
            lambda client: client.adapter("loader").load("kept"),
            lambda client: client.adapter("teacher").sample([1, 2], max_tokens=2),
            lambda client: self.learn_by_tinker(),
        ]


@pytest.mark.parametrize("slots", ["16", "2"])
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_what_needs_tensors_in_the_store_waits_for_it(
    fleet: Fleet,
    seaweedfs: stores.Store,
    how: str,
    slots: str,
    request: pytest.FixtureRequest,
) -> None:
    away = float(request.config.getoption("--away"))
    owner = ColdOwner(fleet, "--max-resident-adapters", slots)
    address = owner.member.address
    with owner.member.client() as client:
        for name in ("student", "loader", "hot"):  # The others are in the store.
            client.adapter(name).sample([1, 2], max_tokens=2)
    sampler = Sampler("hot")
    with (
        weft.Client(address, timeout=120, retry=RETRY) as client,
        ThreadPoolExecutor(8) as pool,
        running(address, [sampler]),
    ):
        getattr(seaweedfs, how)()
        begin = time.monotonic()
        done = [pool.submit(work, client) for work in owner.work()]
        time.sleep(away)
        end = time.monotonic()
        seaweedfs.start() if how == "kill" else seaweedfs.thaw()
        back = time.monotonic()
        for one in done:
            one.result()
        seconds = time.monotonic() - back
        for work in owner.work():
            work(client)
    pause = sampler.longest_pause(begin, end)
    print(
        f"\n{how}, {slots} slots: away {end - begin:.1f} s, done {seconds:.1f} s after"
        f" the store; longest pause of samples {pause:.2f} s"
    )
    if slots != "2":  # The student and the loader have both slots.
        assert pause < SAMPLE_SECONDS
    if away > REQUEST_SECONDS:
        assert "an adapter waits: the store" in owner.member.log_text()
    expected = {
        "cold": (6, 3),
        "student": (6, 3),
        "teacher": (2, 1),
        "loader": (5, 1),
        "hot": (2, 1),
    }
    for restarted in (False, True):
        if restarted:
            owner.restart()
        with owner.member.client() as client:
            assert {name: counts(client, name) for name in expected} == expected
    owner.learn_by_tinker()


def test_samples_from_checkpoints_outlive_the_store(
    fleet: Fleet, seaweedfs: stores.Store, request: pytest.FixtureRequest
) -> None:
    away = float(request.config.getoption("--away"))
    owner = fleet.add("a", *FLAGS)
    owner.wait_for("serving")

    def sample(name: str) -> list[int]:
        with weft.Client(owner.address, timeout=120, retry=RETRY) as client:
            checkpoint = client.checkpoint("x", name)
            result = checkpoint.sample([1, 2, 3], seed=7, max_tokens=4)
            return list(result.samples[0].tokens)

    with owner.client() as client:
        adapter = client.create_adapter("x", rank=4, seed=1)
        for name in ("kept", "cold"):
            learn(adapter, 1)
            adapter.save(name, kind="sampler")
        expected = sample("kept")
        client.delete_adapter("x")
    seaweedfs.kill()
    with ThreadPoolExecutor(1) as pool:
        cold = pool.submit(sample, "cold")
        time.sleep(2)  # The store is known to be away.
        begin = time.monotonic()
        assert sample("kept") == expected
        assert time.monotonic() - begin < SAMPLE_SECONDS
        time.sleep(away)
        assert not cold.done()
        seaweedfs.start()
        assert len(cold.result(60)) == 4
    assert sample("kept") == expected
    assert owner.value("weft_sampler_cache_loads_total") == 2


@pytest.mark.parametrize("what", ["images", "records", "replay"])
def test_a_start_waits_for_the_store(
    fleet: Fleet, seaweedfs: stores.Store, what: str
) -> None:
    """A start reads images and the log, and then the log again while clients work."""
    with FaultProxy(seaweedfs.endpoint) as proxy:
        fleet.environment = seaweedfs.environment(proxy.url)
        owner = fleet.add("a", *FLAGS)
        owner.wait_for("serving")
        with owner.client() as client:
            for name in ("hot", "busy"):
                learn(client.create_adapter(name, rank=4, seed=1), 1)
        write_snapshot(owner)
        rounds = 200 if what == "replay" else 3
        with owner.client() as client:
            for seed in range(rounds):
                learn(client.adapter("busy"), seed)
        owner.kill()
        below = "records" if what == "replay" else what
        held = re.compile(rf"GET /[^?]*/logs/0/{below}/".encode())
        if what != "replay":
            proxy.held = held
        owner.launch()
        pause = 0.0
        if what == "replay":
            owner.wait_for("serving")
            proxy.held = held
            assert owner.value("weft_adapters_recovering") == 1
            with owner.client() as client:
                client.adapter("hot").sample([1, 2], max_tokens=2)
            sampler = Sampler("hot")
            with running(owner.address, [sampler]):
                begin = time.monotonic()
                time.sleep(REQUEST_SECONDS + 4)
                pause = sampler.longest_pause(begin, time.monotonic())
            assert owner.value("weft_adapters_recovering") == 1
        else:
            time.sleep(REQUEST_SECONDS + 4)
        assert owner.exit_code() is None
        assert "waits: " in owner.log_text()
        proxy.held = None
        owner.wait_for("serving")
        owner.wait_until_restored()
        with owner.client() as client:
            expected = (2 * rounds + 2, rounds + 1)
            assert counts(client, "busy") == expected
            learn(client.adapter("busy"), 1)
    print(f"\n{what}: longest pause of samples {pause:.2f} s")
    assert pause < SAMPLE_SECONDS
