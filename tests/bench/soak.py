"""Runs many clients, and many more adapters than fit, for minutes. Every step must
count once, and the daemon's memory, threads and file descriptors must not grow.

Each client owns some adapters. It repeats a random mix of training steps, samples,
steps that it sends twice (as after a broken connection), and new connections. At
the end the server's count for every adapter must equal the client's. A script of the
Tinker SDK trains beside them, if the SDK is installed. Meanwhile the surroundings of
weftd change (disturbances.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import daemon
import models
import numpy as np
import report
from disturbances import Disturbed
from processes import adapter_moves, scratch
from tinker_sdk import SDK, environment

import weft
from weft import aio

# The script's model and its snapshots for sampling.
SDK_ADAPTERS = 64
TOKENS = 12
# The most that a later reading may be, relative to the reading after the first third of
# the run. The limits are above 1, because allocators and gRPC's pools vary.
MOST_GROWTH = {"rss_bytes": 1.1, "threads": 1.1, "file_descriptors": 1.1}


@dataclass
class Counts:
    """The counts that one adapter must have at the end."""

    steps: int = 0
    optim_steps: int = 0


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with scratch() as work:
        address = f"127.0.0.1:{daemon.free_port()}"
        flags = ["--max-resident-adapters", str(options.resident)]
        flags += ["--max-adapters", str(options.adapters + SDK_ADAPTERS)]
        flags += ["--tinker-listen", address, "--model-name", "soak"]
        flags += ["--state-dir", str(work / "state")]
        disturbed = Disturbed(models.tiny_model("llama-tied"), work, *flags)
        with disturbed.running(options.change):
            result = asyncio.run(_soak(options, disturbed.daemon, address))
    result["ours"]["changes"] = dict(disturbed.counts)
    report.emit_ratios(options=options, **result)
    return 0


async def _soak(
    options: argparse.Namespace, process: daemon.Daemon, tinker: str
) -> dict[str, Any]:
    """Spreads the clients over several processes, because one event loop can serve only
    a few clients."""
    loop = asyncio.get_running_loop()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        share = options.clients // options.processes
        runs = [
            loop.run_in_executor(
                pool,
                _clients,
                process.address,
                range(i * share, (i + 1) * share),
                options,
            )
            for i in range(options.processes)
        ]
        sdk = _start_sdk(tinker, options.seconds)
        readings: list[dict[str, float]] = []
        start = time.monotonic()
        while any(not run.done() for run in runs):
            await asyncio.sleep(options.seconds / 60)
            readings.append(_read(process.pid, time.monotonic() - start))
        totals = np.sum([await run for run in runs], axis=0)
        sdk_counts = await loop.run_in_executor(None, _end_sdk, sdk)
    moves = adapter_moves(process.scrape())
    settled = readings[len(readings) // 3]
    ratios: dict[str, Any] = {
        "wrong counts": report.ratio(float(totals[2]), at_most=0),
        "failed calls": report.ratio(float(totals[3]), at_most=0),
        "failed scripts": report.ratio(float("failed" in sdk_counts), at_most=0),
    }
    for name, most in MOST_GROWTH.items():
        peak = max(reading[name] for reading in readings[len(readings) // 3 :])
        ratios[f"{name}, growth"] = report.ratio(peak / settled[name], at_most=most)
    return {
        "bench": "soak",
        "ours": {
            "steps": int(totals[0]),
            "samples": int(totals[1]),
            "sdk": sdk_counts,
            "adapter_moves": moves,
            "readings": readings,
        },
        "ratio": ratios,
        "config": {
            name: getattr(options, name)
            for name in ("clients", "adapters", "resident", "seconds", "change")
        },
    }


def _start_sdk(address: str, seconds: float) -> subprocess.Popen[str] | None:
    if not SDK.exists():
        print(
            "soak: no Tinker SDK: deploy/setup.sh --tests installs it", file=sys.stderr
        )
        return None
    script = Path(__file__).with_name("soak_sdk.py")
    return subprocess.Popen(
        [str(SDK), str(script), "soak", str(seconds)],
        env=environment(f"http://{address}"),
        stdout=subprocess.PIPE,
        text=True,
    )


def _end_sdk(script: subprocess.Popen[str] | None) -> dict[str, int]:
    """Waits for the script and returns what it counted."""
    if script is None:
        return {}
    output, _ = script.communicate(timeout=600)
    counts: dict[str, int] = json.loads(output) if output else {}
    return counts if script.returncode == 0 else {**counts, "failed": 1}


def _clients(address: str, numbers: range, options: argparse.Namespace) -> list[int]:
    """Returns steps, samples, wrong counts and failed calls of these clients."""

    async def run() -> list[int]:
        runs = [Client(address, number, options).run() for number in numbers]
        return [int(total) for total in np.sum(await asyncio.gather(*runs), axis=0)]

    return asyncio.run(run())


class Client:
    def __init__(self, address: str, number: int, options: argparse.Namespace):
        self._address, self._options = address, options
        self._random = random.Random(number)
        each = options.adapters // options.clients
        self._counts = {f"c{number}-{i}": Counts() for i in range(each)}
        self._steps = self._samples = self._failed = 0
        self._deadline = time.monotonic() + options.seconds

    async def run(self) -> list[int]:
        made = False
        while not made or time.monotonic() < self._deadline:
            async with aio.AsyncClient(self._address, timeout=300.0) as client:
                if not made:
                    for name in self._counts:
                        await client.create_adapter(name, rank=4, seed=1)
                    made = True
                await self._work(client, calls=self._random.randint(5, 40))
        async with aio.AsyncClient(self._address, timeout=300.0) as client:
            wrong = [await self._is_wrong(client, name) for name in self._counts]
        return [self._steps, self._samples, sum(wrong), self._failed]

    async def _work(self, client: aio.AsyncClient, calls: int) -> None:
        """Samples or trains up to `calls` times on one connection."""
        for _ in range(calls):
            if time.monotonic() >= self._deadline:
                return
            name = self._random.choice(list(self._counts))
            try:
                if self._random.random() < 0.3:
                    adapter = await client.adapter(name)
                    await adapter.sample(self._tokens(), max_tokens=3, ignore_eos=True)
                    self._samples += 1
                else:
                    await self._train(client, name)
            except weft.WeftError as error:
                self._failed += 1
                print(f"soak: {name}: {error}", file=sys.stderr)
            await asyncio.sleep(self._random.uniform(0, self._options.pause))

    async def _train(self, client: aio.AsyncClient, name: str) -> None:
        """Sends a few gradients and a step, all in flight at once. Sometimes a second
        handle, which has not seen these calls, sends the first gradient again."""
        counts = self._counts[name]
        adapter = await client.adapter(name)
        again = await client.adapter(name)
        data = [weft.Datum.next_token(self._tokens())]
        first = adapter.submit.forward_backward(data)
        others = [
            adapter.submit.forward_backward(data)
            for _ in range(self._random.randint(0, 2))
        ]
        step = adapter.submit.optim_step(learning_rate=1e-3)
        await asyncio.gather(first, *others, step)
        counts.steps += 2 + len(others)
        counts.optim_steps += 1
        self._steps += 2 + len(others)
        if self._random.random() < 0.2:
            result = await again.forward_backward(data)
            if not result.replayed:
                raise SystemExit(f"{name}: step {result.step} ran twice")

    async def _is_wrong(self, client: aio.AsyncClient, name: str) -> bool:
        info = await (await client.adapter(name)).info()
        counts = self._counts[name]
        if (info.last_step, info.optim_steps) == (counts.steps, counts.optim_steps):
            return False
        print(f"soak: {name}: {info}, not {counts}", file=sys.stderr)
        return True

    def _tokens(self) -> np.ndarray:
        return np.array([self._random.randint(3, 319) for _ in range(TOKENS)])


def _read(pid: int, seconds: float) -> dict[str, float]:
    folder = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1)
        for line in (folder / "status").read_text("ascii").splitlines()
        if ":" in line
    )
    return {
        "seconds": round(seconds, 1),
        "rss_bytes": int(status["VmRSS"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "file_descriptors": sum(1 for _ in (folder / "fd").iterdir()),
    }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("soak", __doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--resident", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument(
        "--change", type=float, default=15.0, help="seconds between changes"
    )
    parser.add_argument("--processes", type=int, default=2, help="of clients")
    parser.add_argument("--pause", type=float, default=2.0, help="most between calls")
    return parser.parse_args(arguments)
