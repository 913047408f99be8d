"""Times a take-over of tiny adapters in an object store (SeaweedFS): from the kill of
the owner until the standby answers for an adapter that has not changed since the last
snapshot, and until it answers for all adapters that clients train; and the same for an
unchanged adapter from SIGTERM on."""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import report
from processes import scratch

import weft

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("e2e", "fleet")]

if TYPE_CHECKING:
    from members import Fleet, Member

REPLAY_SECONDS = 5
MOST_SECONDS = 10.0  # Until an unchanged adapter answers after a kill.
MOST_REPLAYS = 2.0  # And this many replays until all answer that clients train.
MOST_STOP_SECONDS = 3.0
PROBE_SECONDS = 0.02
LIMIT_SECONDS = 120.0


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    # Clients say that they wait, which is what is measured.
    logging.getLogger("weft").setLevel(logging.ERROR)
    with scratch() as work:
        ours = measure(options, work)
    kills, stops = ours["kills"], ours["stops"]
    trained = [
        row["last_trained"] / (MOST_SECONDS + MOST_REPLAYS * row["replay"])
        for row in kills
    ]
    unchanged = [row["unchanged"] for row in kills]
    report.emit_ratios(
        "takeover",
        options,
        ours=ours,
        ratio={
            "seconds from a kill to an unchanged adapter, p50": report.ratio(
                statistics.median(unchanged)
            ),
            "seconds from a kill to an unchanged adapter, p99": report.ratio(
                percentile(unchanged, 0.99), at_most=MOST_SECONDS
            ),
            "seconds from a kill to the last adapter in training, most": report.ratio(
                max(row["last_trained"] for row in kills)
            ),
            f"the same / ({MOST_SECONDS:g} s and {MOST_REPLAYS:g} replays)": (
                report.ratio(max(trained), at_most=1)
            ),
            "seconds from SIGTERM to an unchanged adapter, most": report.ratio(
                max(stops), at_most=MOST_STOP_SECONDS
            ),
        },
        config={
            "adapters": options.adapters,
            "training": options.training,
            "rounds": options.rounds,
            "stops": options.stops,
            "snapshot_replay_seconds": REPLAY_SECONDS,
            "store": "SeaweedFS",
        },
    )
    return 0


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least this share of the values reaches."""
    return sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    # A device's bundle has the benches without the tests of object stores.
    import stores
    from members import Fleet, pair
    from trainers import Trainer, running

    flags = ["--snapshot-replay-seconds", str(REPLAY_SECONDS), "--log-format", "json"]
    flags += ["--threads", str(options.threads)]
    with (
        stores.seaweedfs(work / "store") as store,
        Fleet(work, store.url, store.environment()) as fleet,
    ):
        members = pair(fleet, *flags)
        with members[0].client() as client:
            for number in range(options.adapters - options.training):
                client.create_adapter(f"still-{number}", rank=4, seed=number)
        trainers = [Trainer(index) for index in range(options.training)]
        addresses = ",".join(member.listen for member in members)
        rounds = Rounds(fleet, [trainer.adapter_id for trainer in trainers])
        with running(addresses, trainers):
            # Writes a snapshot, as a service that runs for a while has one.
            rounds.stop(options.seconds)
            kills = [rounds.kill(options.seconds) for _ in range(options.rounds)]
            stops = [rounds.stop(options.seconds) for _ in range(options.stops)]
        owner = rounds.owner
        owner.wait_until_restored()
        with owner.client() as client:
            for trainer in trainers:
                trainer.check(client)
    return {
        "kills": kills,
        "stops": stops,
        "steps": sum(trainer.steps for trainer in trainers),
    }


class Rounds:
    """Ends the owner, times its successor, and starts it again as the standby."""

    def __init__(self, fleet: Fleet, trained: list[str]) -> None:
        self.owner, self._standby = fleet.members
        self._trained = trained

    def kill(self, seconds: float) -> dict[str, float]:
        self._settle(seconds)
        begin = time.monotonic()
        self.owner.kill()
        row = self._time(begin)
        print(f"killed: {row}", file=sys.stderr, flush=True)
        self._restart()
        return row

    def stop(self, seconds: float) -> float:
        self._settle(seconds)
        begin = time.monotonic()
        self.owner.terminate()
        found = self._time(begin)["unchanged"]
        print(f"stopped: {found:.2f} s", file=sys.stderr, flush=True)
        if self.owner.wait() != 0:
            raise SystemExit(self.owner.log_tail())
        self._restart()
        return found

    def _settle(self, seconds: float) -> None:
        """Waits until both daemons are ready and clients have trained for a while."""
        self._standby.wait_for("standby")
        self.owner.wait_until_restored()
        time.sleep(seconds)

    def _restart(self) -> None:
        self.owner, self._standby = self._standby, self.owner
        self._standby.launch()

    def _time(self, begin: float) -> dict[str, float]:
        standby = self._standby
        with ThreadPoolExecutor(1 + len(self._trained)) as pool:
            still = pool.submit(seconds_until, begin, partial(answers, standby))
            trained = [
                pool.submit(seconds_until, begin, partial(has, standby, name))
                for name in self._trained
            ]
            row = {
                "unchanged": still.result(),
                "last_trained": max(one.result() for one in trained),
            }
        standby.wait_until_restored()
        return {**row, "replay": replay_seconds(standby)}


def seconds_until(begin: float, holds: Callable[[], bool]) -> float:
    while not holds():
        if time.monotonic() > begin + LIMIT_SECONDS:
            raise SystemExit(f"no answer after {LIMIT_SECONDS:g} s")
        time.sleep(PROBE_SECONDS)
    return time.monotonic() - begin


def answers(member: Member) -> bool:
    """Returns whether an unchanged adapter samples."""
    try:
        with weft.Client(member.address, timeout=10, retry=weft.NO_RETRY) as client:
            client.adapter("still-0").sample([1, 2], max_tokens=1)
    except weft.WeftError:
        return False
    return True


def has(member: Member, adapter_id: str) -> bool:
    """Returns whether the adapter is restored: until then it has no facts."""
    return bool(member.facts(adapter_id).code == "OK")


def replay_seconds(member: Member) -> float:
    """Returns what the latest start of the log reports."""
    rows = map(json.loads, member.log_text().splitlines())
    found = [row["seconds"] for row in rows if row["msg"] == "state recovered"]
    return float(found[-1])


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("takeover", __doc__)
    parser.set_defaults(rounds=20)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--training", type=int, default=10, help="of the adapters")
    parser.add_argument("--stops", type=int, default=5, help="rounds with SIGTERM")
    more = "of training before each end"
    parser.add_argument("--seconds", type=float, default=8.0, help=more)
    return parser.parse_args(arguments)
