"""The object store goes away under load. No process ends, samples are answered
meanwhile, training goes on by itself, and no step is lost or done twice."""

from __future__ import annotations

import time

import pytest
import stores
from daemon import wait_until
from members import Fleet, Member, pair
from trainers import FLAGS, Sampler, Trainer, running

import weft

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)

TRAINERS = 3
# A request to the store is repeated for 10 seconds (s3_client.h), and then the log
# says that it is stalled.
REQUEST_SECONDS = 10.0
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
