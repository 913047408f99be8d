"""Tests sampling as in a step of reinforcement learning: 128 prompts, with 8 samples
of 2,048 tokens each, on a server that decodes 64 sequences at a time."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from fake_weftd import FakeWeftd

import weft

NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 128, 8, 2048
PROMPT = np.arange(64)


def sample(client: weft.Client, max_tokens: int) -> weft.SampleResult:
    return client.sample(PROMPT, num_samples=NUM_SAMPLES, max_tokens=max_tokens)


def wait_for_samples(server: FakeWeftd, count: int) -> None:
    """Waits until `count` calls of Sample have arrived since the server's start."""
    while len([c for c in server.arrived() if c[0] == "Sample"]) < count:
        time.sleep(0.01)


def offer(server: FakeWeftd, client: weft.Client, threads: int) -> int:
    """Returns the decode iterations that the batch takes with `threads` calls in
    flight.

    The server decodes nothing until `threads` calls have arrived. Otherwise most
    iterations would pass while the client's threads start, because an iteration takes
    microseconds.
    """
    before, arrived = server.iterations(), len(server.arrived())
    server.hold()
    with ThreadPoolExecutor(threads) as pool:
        batch = pool.map(lambda _: sample(client, MAX_TOKENS), range(NUM_PROMPTS))
        wait_for_samples(server, arrived + threads)
        server.release()
        results: Sequence[weft.SampleResult] = list(batch)
    for result in results:
        assert [len(s.tokens) for s in result.samples] == [MAX_TOKENS] * NUM_SAMPLES
    return server.iterations() - before


def test_a_whole_batch_at_once_is_as_fast_as_in_pieces() -> None:
    with (
        FakeWeftd() as server,
        weft.Client(server.target, retry=weft.NO_RETRY) as client,
    ):
        in_pieces, at_once = (offer(server, client, n) for n in (16, NUM_PROMPTS))
    assert in_pieces / at_once >= 0.95, (in_pieces, at_once)


def test_a_second_tenant_is_served_before_what_the_first_has_queued() -> None:
    with (
        FakeWeftd() as server,
        weft.Client(server.target, retry=weft.NO_RETRY) as client,
        ThreadPoolExecutor(NUM_PROMPTS + 1) as pool,
    ):
        flooder = client.create_adapter("flooder", rank=4, tenant="alice")
        polite = client.create_adapter("polite", rank=4, tenant="bob")
        server.hold()
        flood = [
            pool.submit(
                flooder.sample, PROMPT, num_samples=NUM_SAMPLES, max_tokens=MAX_TOKENS
            )
            for _ in range(NUM_PROMPTS)
        ]
        wait_for_samples(server, NUM_PROMPTS)
        asked = pool.submit(polite.sample, PROMPT, max_tokens=16)
        wait_for_samples(server, NUM_PROMPTS + 1)
        served_before: list[int] = []
        asked.add_done_callback(
            lambda _: served_before.append(sum(call.done() for call in flood))
        )
        server.release()
        asked.result(60)
        for call in flood:
            call.result(60)
    assert served_before[0] <= NUM_PROMPTS // 4


def refusals(server: FakeWeftd) -> int:
    """Returns how many calls the server has refused for their tenant's share."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        lines = page.read().decode().splitlines()
    series = 'weft_requests_rejected_total{reason="quota"} '
    return sum(int(line.removeprefix(series)) for line in lines if series in line)


def test_calls_are_repeated_while_the_server_says_so() -> None:
    """Makes more calls than the server has memory for. Holds the server until there
    were nine attempts per call on average. max_attempts is 2, but a refusal with a
    retry hint does not count as an attempt."""
    policy = weft.RetryPolicy(max_attempts=2, initial_delay=0.01)
    with (
        FakeWeftd("--request-memory", "2MiB") as server,
        weft.Client(server.target, retry=policy, timeout=60) as client,
        ThreadPoolExecutor(32) as pool,
    ):
        server.retry_hint(20)
        server.hold()
        calls = [pool.submit(sample, client, 4) for _ in range(32)]
        while refusals(server) < 8 * 32:
            time.sleep(0.05)
        server.release()
        for call in calls:
            call.result(60)
