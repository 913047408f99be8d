"""Times calls through the edge (deploy/edge: nginx with TLS) and the same calls to
weftd directly, in turns: the smallest calls, a request of many megabytes, and samples
of a tiny model, where nothing else counts."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import report
from processes import scratch

import weft

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("deploy", "client", "edge")]

SIDES = ("direct", "edge")
WARM_CALLS = 20
MOST_MORE_SECONDS = 0.3e-3
MOST_LARGE_RATIO = 1.05


def main(arguments: list[str]) -> int:
    # A device's bundle has the benches without the edge.
    import edge_server

    options = _parse(arguments)
    with scratch() as work, edge_server.Edge(work).running() as edge:
        clients = {
            "direct": weft.Client(
                edge.daemon.address, security=weft.Security(token=edge.alice)
            ),
            "edge": edge.client(edge.alice, timeout=600.0),
        }
        small = _compare(_small_calls(clients), options.calls)
        large = _compare(_large_calls(clients, options.megabytes), options.large_calls)
        for client in clients.values():
            client.close()
    ratios = {
        f"{name}: more at the edge / {MOST_MORE_SECONDS * 1e3:g} ms": report.ratio(
            (seconds["edge"] - seconds["direct"]) / MOST_MORE_SECONDS, at_most=1
        )
        for name, seconds in small.items()
    }
    ratios |= {
        f"{name}: edge/direct": report.ratio(
            seconds["edge"] / seconds["direct"], at_most=MOST_LARGE_RATIO
        )
        for name, seconds in large.items()
    }
    calls = {**small, **large}
    report.emit_ratios(
        "edge",
        options,
        ours={name: seconds["edge"] for name, seconds in calls.items()},
        peer={"direct": {name: seconds["direct"] for name, seconds in calls.items()}},
        ratio=ratios,
        config={
            "calls": options.calls,
            "megabytes": options.megabytes,
            "large_calls": options.large_calls,
        },
    )
    return 0


Calls = dict[str, dict[str, Callable[[], Any]]]


def _small_calls(clients: dict[str, weft.Client]) -> Calls:
    clients["direct"].create_adapter("small", rank=8)
    data = [weft.Datum.next_token(np.arange(3, 20))]
    calls: Calls = {"get_info": {}, "forward 1 x 16": {}, "sample 1 x 1": {}}
    losses = []
    for side, client in clients.items():
        adapter = client.adapter("small")
        losses.append(adapter.forward(data).metrics["loss:sum"])
        calls["get_info"][side] = client.info
        calls["forward 1 x 16"][side] = partial(adapter.forward, data)
        calls["sample 1 x 1"][side] = partial(adapter.sample, [5], max_tokens=1)
    report.expect_close("loss", losses[0], losses[1], 0.0)
    return calls


def _large_calls(clients: dict[str, weft.Client], megabytes: int) -> Calls:
    """A request whose tokens carry many soft targets, so that its bytes cost more than
    its arithmetic, and a sample of many tokens."""
    targets = 320  # All tokens of the model.
    rows = max(1, megabytes * 10**6 // (targets * 8 * 100))
    data = [
        weft.Datum(
            np.arange(100) % 300,
            np.tile(np.arange(targets), (100, 1)),
            weights=np.full((100, targets), 1 / targets, np.float32),
        )
        for _ in range(rows)
    ]
    name = f"forward of {rows * targets * 100 * 8 / 1e6:.0f} MB"
    calls: Calls = {name: {}, "sample 8 x 64": {}}
    for side, client in clients.items():
        adapter = client.adapter("small")
        calls[name][side] = partial(adapter.forward, data)
        calls["sample 8 x 64"][side] = partial(
            adapter.sample, [5], num_samples=8, max_tokens=64, ignore_eos=True
        )
    return calls


def _compare(calls: Calls, count: int) -> dict[str, dict[str, float]]:
    """Returns the median seconds of each call on each side. The sides take turns, call
    by call, because the machine changes from second to second."""
    medians = {}
    for name, sides in calls.items():
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn in range(count + min(WARM_CALLS, count)):
            for side in SIDES:
                start = time.perf_counter()
                sides[side]()
                if turn >= min(WARM_CALLS, count):
                    seconds[side].append(time.perf_counter() - start)
        medians[name] = {side: statistics.median(of) for side, of in seconds.items()}
    return medians


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("edge", __doc__)
    parser.add_argument(
        "--calls", type=int, default=500, help="small ones of each kind"
    )
    parser.add_argument("--large-calls", type=int, default=9, help="of each kind")
    parser.add_argument("--megabytes", type=int, default=16, help="of a large request")
    return parser.parse_args(arguments)
