"""Samples from a checkpoint by any edge: all daemons draw them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import daemon as daemon_module
import pytest
import stores
from doors import Doors, Site
from durable import train
from members import Fleet

import weft

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)

SAMPLE = "/weft.v1.SamplingService/Sample"
CALLS = 60
BURSTS = 4  # So that a kill comes while some run.
TOKENS = 64
QUEUED = "weft_sample_queued_tokens"


@pytest.fixture
def doors(fleet: Fleet) -> Iterator[Doors]:
    with Doors(fleet, logs=3) as made:
        yield made


@pytest.fixture
def three(doors: Doors) -> list[Site]:
    """Returns the sites of three owners. The first one's has adapter x."""
    sites = [doors.add(name) for name in ("a", "b", "c")]
    with doors.client(sites[0], doors.alice) as client:
        client.create_adapter("x", rank=4, seed=1)
        train(client, "x", 0)
        client.adapter("x").save("c", kind="sampler")
    return sites


def draw(client: weft.Client, seed: int) -> list[int]:
    prompt = [5 + seed % 7, 6, 7, 8 + seed % 5]
    result = client.checkpoint("x", "c").sample(
        prompt, seed=seed, max_tokens=TOKENS, ignore_eos=True
    )
    return list(result.samples[0].tokens)


def at_once(client: weft.Client) -> list[list[int]]:
    with ThreadPoolExecutor(CALLS) as pool:
        return list(pool.map(lambda seed: draw(client, seed), range(CALLS)))


def expected(doors: Doors, site: Site) -> list[list[int]]:
    """Returns what a daemon without an edge draws."""
    security = weft.Security(token=doors.alice)
    with weft.Client(site.member.address, security=security) as client:
        return at_once(client)


def handled(sites: list[Site]) -> list[float]:
    return [site.handled("Sample") for site in sites]


def warm_up(client: weft.Client, sites: list[Site]) -> None:
    """Samples until the edge's daemon knows the others."""

    def all_sampled() -> bool:
        at_once(client)
        return min(handled(sites)) > 0

    daemon_module.wait_until(all_sampled)


def test_all_daemons_draw_their_share(doors: Doors, three: list[Site]) -> None:
    alone = handled(three)
    drawn = expected(doors, three[1])
    assert handled(three) == [alone[0], alone[1] + CALLS, alone[2]]
    with doors.client(three[0], doors.alice, timeout=60) as client:
        warm_up(client, three)
        before = handled(three)
        shares = [0.0]

        # Samples as short as these may go to one of them for some seconds.
        def all_have_shares() -> bool:
            assert at_once(client) == drawn
            after = handled(three)
            shares[:] = [
                late - early for early, late in zip(before, after, strict=True)
            ]
            return min(shares) >= CALLS / 6

        daemon_module.wait_until(all_have_shares)
        print(f"shares of calls by one edge: {shares}")
        assert sum(shares) % CALLS == 0
        # A stream goes the same way, and all else to the adapter's owner.
        for _ in range(10):
            stream = client.checkpoint("x", "c").sample_stream([5, 6], max_tokens=3)
            assert list(stream)
        assert client.adapter("x").sample([5, 6, 7], max_tokens=4)
    assert sum(site.handled("SampleStream") for site in three) == 10
    assert three[0].member.value("weft_samples_sent_on_total") >= sum(shares[1:])
    daemon_module.wait_until(
        lambda: all(site.member.value(QUEUED) == 0 for site in three)
    )


def test_calls_to_a_daemon_that_dies_are_repeated(
    doors: Doors, three: list[Site]
) -> None:
    drawn = expected(doors, three[1])
    with doors.client(three[0], doors.alice, timeout=120) as client:
        warm_up(client, three)
        with ThreadPoolExecutor(1) as pool:
            calls = pool.submit(lambda: [at_once(client) for _ in range(BURSTS)])
            daemon_module.wait_until(lambda: three[2].member.value(QUEUED) > 0)
            three[2].member.kill()
            assert calls.result() == [drawn] * BURSTS
        failed = [line for line in three[0].lines(SAMPLE) if '_status":"14"' in line]
        print(f"{len(failed)} calls failed and were repeated")
        assert failed
        # Nobody is sent there any more, soon.
        assert at_once(client) == drawn

        def none_fails() -> bool:
            count = len(three[0].lines(SAMPLE))
            at_once(client)
            lines = three[0].lines(SAMPLE)[count:]
            return not any('_status":"14"' in line for line in lines)

        daemon_module.wait_until(none_fails)
