"""Clients that train, sample and save while their servers or the store go away."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from durable import VOCAB
from texts import next_token, random_tokens

import weft

# Two of these rows do not fit into one batch, so each is alone in its own. Then its
# bits do not depend on what other clients train at the same time.
TOKENS = 20
FLAGS = ("--max-batch-tokens", str(2 * TOKENS - 1))
SAVE_EVERY = 4  # Rounds.
CALL_SECONDS = 120.0  # A call is repeated for this long.
MOVE_SECONDS = 60.0
# Clients come back soon, so that what strikes next meets them at work.
RETRY = weft.RetryPolicy(max_delay=0.5)


class Trainer:
    """Trains one adapter in rounds, and notes what was acknowledged. A round depends on
    nothing but its number, so the same number of rounds has the same results."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.adapter_id = f"a{index}"
        self.rounds = 0
        self.steps = 0
        self.saves: dict[str, int] = {}  # The optimizer steps in each checkpoint.
        self.samples = 0
        self.slowest = 0.0  # Seconds of a round.

    def run(self, target: str, done: threading.Event, rounds: int = -1) -> None:
        """Trains until `done` is set, or for as many rounds. Of several addresses, each
        trainer begins with another one."""
        addresses = target.split(",")
        first = self.index % len(addresses)
        target = ",".join(addresses[first:] + addresses[:first])
        with weft.Client(target, timeout=CALL_SECONDS, retry=RETRY) as client:
            adapter = client.get_or_create(
                self.adapter_id, rank=2 + self.index % 4, seed=self.index
            )
            while not done.is_set() and self.rounds != rounds:
                begin = time.monotonic()
                self._round(adapter)
                self.slowest = max(self.slowest, time.monotonic() - begin)

    def _round(self, adapter: Any) -> None:
        for part in range(2):
            seed = 100_000 * self.index + 2 * self.rounds + part
            tokens = random_tokens(VOCAB, TOKENS + 1, seed)
            adapter.forward_backward([next_token(tokens)])
            self.steps += 1
        adapter.optim_step(learning_rate=1e-2)
        self.steps += 1
        if self.rounds % SAVE_EVERY == 0:
            name = f"s{self.rounds % 3}"
            adapter.save(name, overwrite=True)
            self.steps += 1
            self.saves[name] = self.rounds + 1
        # The last act of a round, so that a round that fails is no round.
        self.rounds += 1
        sampled = adapter.sample([1, 2, 3], max_tokens=3, ignore_eos=True)
        assert len(sampled.samples[0].tokens) == 3
        self.samples += 1

    def check(self, client: Any) -> None:
        """Every acknowledged step must have been done once."""
        info = client.adapter(self.adapter_id).info()
        found = (info.next_step - 1, info.optim_steps)
        expected = (self.steps, self.rounds)
        assert found == expected, f"{self.adapter_id}: {found} steps, not {expected}"

    def check_saves(self, client: Any) -> None:
        """Every acknowledged checkpoint must be there. Ends the adapter's training."""
        adapter = client.adapter(self.adapter_id)
        for name, optim_steps in self.saves.items():
            found = adapter.load(name).optim_steps
            assert found == optim_steps, f"{self.adapter_id}/{name} has {found} steps"


class Sampler:
    """Samples an adapter, and notes when it got an answer."""

    def __init__(self, adapter_id: str) -> None:
        self.adapter_id = adapter_id
        self.answers: list[float] = []

    def run(self, target: str, done: threading.Event) -> None:
        with weft.Client(target, timeout=CALL_SECONDS, retry=RETRY) as client:
            adapter = client.adapter(self.adapter_id)
            while not done.is_set():
                adapter.sample([1, 2, 3], max_tokens=3)
                self.answers.append(time.monotonic())
                time.sleep(0.05)

    def longest_pause(self, begin: float, end: float) -> float:
        """Returns the longest time without an answer."""
        times = [begin, *(t for t in self.answers if begin < t < end), end]
        return max(after - before for before, after in pairwise(times))


class Mover:
    """Moves adapters to logs at random, and counts how the moves end."""

    def __init__(self, names: Sequence[str], logs: int, seed: int) -> None:
        self._names = names
        self._logs = logs
        self._random = random.Random(seed)
        self.ends: Counter[str] = Counter()

    def run(self, target: str, done: threading.Event) -> None:
        with weft.Client(target, timeout=MOVE_SECONDS, retry=RETRY) as client:
            while not done.is_set():
                name = self._random.choice(self._names)
                try:
                    client.move_adapter(name, self._random.randrange(self._logs))
                    self.ends["moved"] += 1
                except weft.WeftError as error:
                    self.ends[type(error).__name__] += 1
                time.sleep(self._random.uniform(0.0, 0.2))


@contextmanager
def running(
    target: str, workers: Sequence[Trainer | Sampler | Mover]
) -> Iterator[None]:
    """Runs the workers beside what is inside. None of them may fail."""
    done = threading.Event()
    with ThreadPoolExecutor(len(workers)) as pool:
        runs = [pool.submit(worker.run, target, done) for worker in workers]
        try:
            yield
        except BaseException:
            done.set()
            for run in runs:
                run.result()  # Its error says more than that of who waits for it.
            raise
        done.set()
        for run in runs:
            run.result()
