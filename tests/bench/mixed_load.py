"""Trains and samples at the same time. Measures how long the first token of a short
prompt takes while clients flood training, and how fast training and sampling are at the
same time. Also measures whether tenants of equal weight get equal shares, whatever load
they offer, and whether a flood makes another tenant's request fail."""

from __future__ import annotations

import argparse
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import daemon
import inputs
import numpy as np
import report
from processes import RANK, running, scratch

import weft

FLOODING = 4
DEPTH = 4  # The most requests that one client has in flight.
# The first token may take as long as without training, plus this many micro-batches.
MOST_BATCHES = 1.5
MOST_UNEVEN = 0.1


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with scratch() as work:
        bench = MixedLoad(options, work)
        alone = bench.first_tokens()
        points = [bench.beside(count) for count in options.trainers]
        shares = bench.shares()
    flooded = points[-1]
    limit = MOST_BATCHES * flooded["batch_seconds"] + alone["median"]
    uneven = abs(shares["few"] / shares["many"] - 1)
    ratios = {
        f"p95 first token, {options.trainers[-1]} flooding / limit": report.ratio(
            flooded["first_token"]["p95"] / limit, at_most=1
        ),
        "difference of equal shares": report.ratio(uneven, at_most=MOST_UNEVEN),
        "failed requests": report.ratio(
            sum(point["failed"] for point in points) + shares["failed"], at_most=0
        ),
    }
    report.emit_ratios(
        "mixed_load",
        options,
        ours={"alone": alone, "points": points, "shares": shares},
        ratio=ratios,
        config=report.config(
            options,
            "prompt",
            "samples",
            "sample_tokens",
            "batch_tokens",
            data_tokens=options.length,
        ),
    )
    return 0


class Trainer:
    """Keeps requests of one adapter in flight until stopped. Each request in flight has
    a different datum, because the daemon would compute equal data only once."""

    def __init__(self, adapter: Any, data: list[weft.Datum]):
        self._adapter, self._data = adapter, data
        self._stopped = threading.Event()
        self.tokens = self.failed = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        flight = deque(self._submit(datum) for datum in self._data)
        while not self._stopped.is_set():
            datum, future = flight.popleft()
            if self._succeeds(future):
                self.tokens += len(datum.tokens)
            flight.append(self._submit(datum))
        for _, future in flight:
            self._succeeds(future)

    def _submit(self, datum: weft.Datum) -> tuple[weft.Datum, Future[Any]]:
        return datum, self._adapter.submit.forward_backward([datum])

    def _succeeds(self, future: Future[Any]) -> bool:
        try:
            future.result()
        except weft.WeftError:
            self.failed += 1
            return False
        return True

    def stop(self) -> None:
        self._stopped.set()

    def join(self) -> None:
        self._thread.join()


class MixedLoad:
    def __init__(self, options: argparse.Namespace, work: Path):
        self._options, self._work = options, work
        count = DEPTH * max(options.trainers[-1], FLOODING)
        self._rows = inputs.rows(options.model, count, options.length + 1)
        self._prompts = inputs.rows(options.model, options.samples, options.prompt)

    @contextmanager
    def _daemon(self) -> Iterator[tuple[daemon.Daemon, Any]]:
        flags = ("--max-batch-tokens", str(self._options.batch_tokens))
        with running(self._options, self._work, *flags) as (process, client):
            client.sample(self._prompts[0], max_tokens=2)
            yield process, client

    def first_tokens(self) -> dict[str, float]:
        with self._daemon() as (_, client):
            return _summary([self._first_token(client, row) for row in self._prompts])

    def beside(self, count: int) -> dict[str, Any]:
        """Samples repeatedly, one sample after another, while `count` clients flood
        training."""
        with self._daemon() as (process, client):
            trainers = [self._trainer(client, i, depth=2) for i in range(count)]
            time.sleep(self._options.warm_seconds)
            before, start = _batches(process.scrape()), time.perf_counter()
            seconds = [self._first_token(client, row) for row in self._prompts]
            elapsed = time.perf_counter() - start
            batches, busy = np.subtract(_batches(process.scrape()), before)
            tokens = sum(trainer.tokens for trainer in trainers)
            for trainer in trainers:
                trainer.stop()
            for trainer in trainers:
                trainer.join()
        sampled = len(seconds) * self._options.sample_tokens
        print(f"mixed_load: {count} trainers: {_summary(seconds)}", file=sys.stderr)
        return {
            "trainers": count,
            "first_token": _summary(seconds),
            "batch_seconds": float(busy / batches) if batches else 0.0,
            "train_tokens_per_second": tokens / (elapsed + self._options.warm_seconds),
            "sample_tokens_per_second": sampled / elapsed,
            "failed": sum(trainer.failed for trainer in trainers),
        }

    def shares(self) -> dict[str, Any]:
        """Returns the trained tokens of two tenants of equal weight. `many` has three
        adapters and many requests in flight. `few` has one adapter and two requests."""
        with self._daemon() as (_, client):
            many = [
                self._trainer(client, i, depth=DEPTH, tenant="many")
                for i in range(FLOODING - 1)
            ]
            few = [self._trainer(client, FLOODING - 1, depth=2, tenant="few")]
            time.sleep(self._options.warm_seconds)
            before = [_tokens(many), _tokens(few)]
            time.sleep(self._options.share_seconds)
            counts = np.subtract([_tokens(many), _tokens(few)], before)
            for trainer in many + few:
                trainer.stop()
            for trainer in many + few:
                trainer.join()
        failed = sum(trainer.failed for trainer in many + few)
        return {"many": int(counts[0]), "few": int(counts[1]), "failed": failed}

    def _trainer(
        self, client: Any, number: int, depth: int, tenant: str | None = None
    ) -> Trainer:
        adapter = client.create_adapter(f"t{number}", rank=RANK, tenant=tenant)
        rows = self._rows[DEPTH * number : DEPTH * number + depth]
        return Trainer(adapter, [weft.Datum.next_token(row) for row in rows])

    def _first_token(self, client: Any, row: np.ndarray) -> float:
        """Returns the seconds from the call to its first token. The other tokens
        are drawn too."""
        start = time.perf_counter()
        tokens = self._options.sample_tokens
        stream = client.sample_stream(row, max_tokens=tokens, ignore_eos=True)
        next(stream)
        seconds = time.perf_counter() - start
        for _ in stream:
            pass
        return seconds


def _tokens(trainers: list[Trainer]) -> int:
    return sum(trainer.tokens for trainer in trainers)


def _batches(page: str) -> tuple[float, float]:
    """Returns the number of training micro-batches so far, and their seconds."""

    def value(suffix: str) -> float:
        name = rf'^weft_step_seconds_{suffix}{{phase="train"}} (\S+)$'
        found = re.search(name, page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    return value("count"), value("sum")


def _summary(seconds: list[float]) -> dict[str, float]:
    return {
        "median": float(np.median(seconds)),
        "p95": float(np.percentile(seconds, 95)),
        "most": max(seconds),
    }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("mixed_load", __doc__)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--samples", type=int, default=20, help="one after the other")
    parser.add_argument("--sample-tokens", type=int, default=8, help="of each sample")
    parser.add_argument("--length", type=int, default=256, help="tokens of a datum")
    parser.add_argument("--batch-tokens", type=int, default=512, help="micro-batch")
    parser.add_argument("--trainers", type=int, nargs="+", default=[1, 2, FLOODING])
    parser.add_argument("--warm-seconds", type=float, default=3.0)
    parser.add_argument("--share-seconds", type=float, default=40.0)
    return report.parse_with_model(parser, arguments)
