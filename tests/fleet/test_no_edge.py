"""Clients of daemons without an edge, which know one daemon alone: it names the owner
of their adapter, and the owner may die during a call."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import stores
from daemon import wait_until
from durable import VOCAB, train
from members import Fleet, Member
from texts import next_token, random_tokens

import weft

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)

MESSAGE_BYTES = 64 << 20
FLAGS = ("--logs", "2", "--max-message-bytes", str(MESSAGE_BYTES))
# Long enough that the owner dies meanwhile.
PROMPT = [5, 6, 7]
TOKENS = 400
ROWS = 600


def other_and_owner(fleet: Fleet) -> tuple[Member, Member]:
    """Returns the two owners. The second one has the adapter x."""
    a, b = (fleet.add(name, *FLAGS) for name in ("a", "b"))
    for member in (a, b):
        member.wait_for("serving")
    with b.client() as client:
        client.create_adapter("x", rank=4, seed=1)
        train(client, "x", 0)
    return a, b


def handled(member: Member) -> float:
    """Returns how many forward_backwards the daemon has answered."""
    pattern = r'^grpc_server_handled_total\{.*"ForwardBackward".*\} (\S+)$'
    return sum(map(float, re.findall(pattern, member.scrape(), re.M)))


def test_a_large_request_gets_to_the_owner(fleet: Fleet) -> None:
    a, b = other_and_owner(fleet)
    # Almost 64 MiB. The owner refuses what is in it.
    tokens = np.zeros((MESSAGE_BYTES - 65536) // 8, np.uint32)
    datum = weft.Datum(tokens, targets=tokens)
    log = a.served_log()
    assert log is not None
    with weft.Client(b.address, timeout=120) as client:
        adapter = client.adapter("x")
        with a.client() as other:
            other.move_adapter("x", log)
        before = handled(a), handled(b)
        # The client still knows the former owner alone.
        begin = time.monotonic()
        with pytest.raises(weft.InvalidArgument, match="has 8380416 values"):
            adapter.forward_backward([datum])
        print(f"64 MiB: {time.monotonic() - begin:.2f} s")
        assert (handled(a), handled(b)) == (before[0] + 1, before[1] + 1)
        train(client, "x", 1)
        assert adapter.info().optim_steps == 2


def during(owner: Member, call: Callable[[], Any]) -> Any:
    """Kills the owner while it works on the call, and returns the call's result."""
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(call)
        wait_until(lambda: owner.value("weft_requests_inflight") > 0 or result.done())
        assert not result.done(), "the call has ended before the owner died"
        owner.kill()
        return result.result()


def restart(member: Member) -> None:
    member.launch()
    member.wait_for("standby")


def test_the_owner_dies_during_a_call(fleet: Fleet) -> None:
    a, b = other_and_owner(fleet)
    log = b.served_log()
    with weft.Client(a.address, timeout=120) as client:
        adapter = client.adapter("x")

        def sample() -> list[int]:
            drawn = adapter.sample(PROMPT, max_tokens=TOKENS, ignore_eos=True, seed=7)
            return list(drawn.samples[0].tokens)

        expected = sample()
        c = fleet.add("c", *FLAGS)
        c.wait_for("standby")
        assert during(b, sample) == expected
        assert c.served_log() == log

        restart(b)
        rows = [next_token(random_tokens(VOCAB, 40, seed)) for seed in range(ROWS)]
        during(c, lambda: adapter.forward_backward(rows))
        adapter.optim_step(learning_rate=1e-2)
        info = adapter.info()
        assert (info.optim_steps, info.next_step) == (2, 5)
        assert b.served_log() == log

        restart(c)
        expected = sample()
        stream = adapter.sample_stream(
            PROMPT, max_tokens=TOKENS, ignore_eos=True, seed=7
        )
        first = next(stream)
        b.kill()
        # It is not repeated, since its reader has a part of it, if not all.
        with contextlib.suppress(weft.Unavailable):
            list(stream)
        assert sample() == expected
        assert expected[: len(first.tokens)] == list(first.tokens)
