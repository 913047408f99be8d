"""Makes requests that should meet in one batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def together(
    client: Any, calls: Sequence[Callable[[], T]], *, occupy: bool = True
) -> list[T]:
    """Runs the calls at the same time and returns their results in order.

    occupy: first keeps the engine busy with a long forward pass of the base model,
    so that the calls wait together and are planned as one batch.
    """
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        barrier.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls) + 1) as pool:
        if occupy:
            blocker = pool.submit(_occupy, client)
            time.sleep(0.05)
        futures = [pool.submit(run, call) for call in calls]
        results = [future.result(300) for future in futures]
        if occupy:
            blocker.result(300)
    return results


def _occupy(client: Any) -> None:
    import weft

    model = client.info().model
    tokens = np.arange(128) % model.vocab_size
    # A tiny model needs many more tokens to take the same fraction of a
    # second.
    count = 1 if model.num_parameters > 50_000_000 else 128
    client.forward([weft.Datum(tokens, tokens)] * count)
