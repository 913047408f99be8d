"""Times samples from one checkpoint by the edge of one daemon: drawn by this daemon
alone, by another one alone, and by both. Each daemon has one core. The tokens must be
those that a daemon without an edge draws."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import report
from processes import scratch

import weft

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("e2e", "fleet")]

if TYPE_CHECKING:
    from doors import Doors, Site

LEAST_SHARE = 0.8  # Of the sum of the two alone.
LIMIT_SECONDS = 60.0
SIDES = ("first", "second", "both")


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with scratch() as work:
        rates, drawn = measure(options, work)
    best = {side: max(of_side) for side, of_side in rates.items()}
    alone = best["first"] + best["second"]
    report.emit_ratios(
        "rollouts",
        options,
        ours={
            "tokens_per_second": rates,
            "drawn by the second of both": statistics.mean(drawn),
        },
        ratio={
            "tokens per second of both / sum of each alone": report.ratio(
                best["both"] / alone, at_least=LEAST_SHARE
            ),
            "tokens per second of both / the first alone": report.ratio(
                best["both"] / best["first"]
            ),
        },
        config={
            "calls": options.calls,
            "clients": options.clients,
            "samples": options.samples,
            "tokens": options.tokens,
            "rounds": options.rounds,
            "model": "tiny",
            "cores of a daemon": 1,
            "store": "SeaweedFS",
        },
    )
    return 0


def measure(
    options: argparse.Namespace, work: Path
) -> tuple[dict[str, list[float]], list[float]]:
    """Returns the rates of each side, and the second daemon's shares of the calls that
    both have drawn."""
    # A device's bundle has the benches without the tests of object stores.
    import stores
    from doors import Doors
    from members import Fleet

    with stores.seaweedfs(work / "store") as store:
        environment = {**store.environment(), "WEFT_THREADS": "1"}
        with Fleet(work, store.url, environment) as fleet, Doors(fleet) as doors:
            pair = Pair(doors, options)
            rates: dict[str, list[float]] = {side: [] for side in SIDES}
            drawn = []
            for _ in range(options.rounds):
                for side in SIDES:
                    rate, share = pair.time(side)
                    rates[side].append(rate)
                    if side == "both":
                        drawn.append(share)
            pair.close()
    return rates, drawn


class Pair:
    """Two daemons with edges, and a client at the edge of the first one."""

    def __init__(self, doors: Doors, options: argparse.Namespace) -> None:
        self._options = options
        admin = weft.Security(token=doors.tokens.add("ops", "ops", "admin"))
        self._sites = [doors.add(name) for name in ("a", "b")]
        cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
        for site in self._sites:
            pin(site, next(cores))
        self._admins = [
            weft.Client(site.member.address, security=admin, timeout=LIMIT_SECONDS)
            for site in self._sites
        ]
        self._client = doors.client(self._sites[0], doors.alice, timeout=600.0)
        self._client.create_adapter("x", rank=8, seed=1)
        self._client.adapter("x").save("c", kind="sampler")
        alone = weft.Security(token=doors.alice)
        with weft.Client(self._sites[1].member.address, security=alone) as client:
            self._expected = self._draw(client)

    def close(self) -> None:
        for client in (self._client, *self._admins):
            client.close()

    def time(self, side: str) -> tuple[float, float]:
        """Returns tokens a second, and the second daemon's share of the calls."""
        drained = [
            self._admins[number]
            for number, other in enumerate(("second", "first"))
            if side == other
        ]
        for admin in drained:
            admin.drain()
        self._settle(side)
        before = self._handled()
        begin = time.monotonic()
        tokens = self._draw(self._client)
        seconds = time.monotonic() - begin
        after = self._handled()
        for admin in drained:
            admin.undrain()
        if tokens != self._expected:
            raise SystemExit("rollouts: a daemon has drawn other tokens")
        rate = sum(map(len, tokens)) / seconds
        share = (after[1] - before[1]) / sum(map(float.__sub__, after, before))
        print(f"{side}: {rate:.0f} tokens/s, {share:.2f}", file=sys.stderr, flush=True)
        return rate, share

    def _settle(self, side: str) -> None:
        """Waits until the daemons know which of them draw."""
        limit = time.monotonic() + LIMIT_SECONDS
        shares: dict[str, Callable[[float], bool]] = {
            "first": lambda share: share == 0,
            "second": lambda share: share == 1,
            "both": lambda share: 0.3 < share < 0.7,
        }
        while True:
            before = self._handled()
            self._draw(self._client, self._options.clients)
            after = self._handled()
            calls = sum(map(float.__sub__, after, before))
            if shares[side]((after[1] - before[1]) / calls):
                return
            if time.monotonic() > limit:
                raise SystemExit(f"rollouts: {side} did not get the calls")
            time.sleep(0.2)

    def _handled(self) -> list[float]:
        return [float(site.handled("Sample")) for site in self._sites]

    def _draw(self, client: weft.Client, calls: int = 0) -> list[list[int]]:
        sampler = client.checkpoint("x", "c")

        def one(seed: int) -> list[list[int]]:
            result = sampler.sample(
                [5 + seed % 7, 6, 7, 8 + seed % 5],
                seed=seed,
                num_samples=self._options.samples,
                max_tokens=self._options.tokens,
                ignore_eos=True,
            )
            return [list(sample.tokens) for sample in result.samples]

        with ThreadPoolExecutor(self._options.clients) as pool:
            drawn = pool.map(one, range(calls or self._options.calls))
            return [tokens for samples in drawn for tokens in samples]


def pin(site: Site, core: int) -> None:
    """Gives a daemon one core for all its threads."""
    command = ["taskset", "-acp", str(core), str(site.member.pid)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("rollouts", __doc__)
    parser.set_defaults(rounds=5)
    parser.add_argument("--calls", type=int, default=96, help="in each timing")
    parser.add_argument("--clients", type=int, default=32, help="calls at once")
    parser.add_argument("--samples", type=int, default=4, help="in each call")
    parser.add_argument("--tokens", type=int, default=96, help="in each sample")
    return parser.parse_args(arguments)
