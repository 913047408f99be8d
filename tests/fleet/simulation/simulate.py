#!/usr/bin/env python3
"""Simulates a fleet: 64 daemons with 10,000 adapters, of which one or ten die, or all
are updated one after another, with 1, 2 and 4 standbys.

Prints how long adapters have no answer and how much throughput is lost, and beside it
what a take-over took that was measured. The last line of stdout is one JSON line as
that of a bench, with all assumptions. With --plot also draws it.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import costs as costs_module
from costs import Costs
from events import Fleet, Outage

TESTS = Path(__file__).resolve().parents[2]
STANDBYS = (1, 2, 4)
BEFORE = 20.0  # Seconds until processes die: then standbys know the owners.
MOST_SECONDS = 10.0  # Until an unchanged adapter answers after one death.
MOST_WHOLE = 6 * 3600.0


@dataclass(frozen=True)
class Scenario:
    title: str
    begin: Callable[[Fleet], None]
    seeds: int


def deaths(count: int, in_place: bool) -> Callable[[Fleet], None]:
    """Kills owners of logs."""

    def kill(fleet: Fleet) -> None:
        owners = [log.owner for log in fleet.logs]
        fleet.kill(fleet.random.sample(owners, count), in_place)

    return kill


SCENARIOS = {
    "one process": Scenario("One process dies", deaths(1, in_place=True), 400),
    "ten processes": Scenario("Ten processes die", deaths(10, in_place=True), 200),
    "ten machines": Scenario("Ten machines die", deaths(10, in_place=False), 200),
    "update": Scenario("Rolling update", Fleet.update, 10),
}


@dataclass(frozen=True)
class Result:
    """Outages of all seeds; times count from the deaths, or the update's begin."""

    outages: list[Outage]
    seeds: int
    whole: float  # The longest time until all processes were back.
    takes: int
    refused_swaps: int

    def unchanged(self, image: float, called: int) -> list[float]:
        """Returns when the first `called` adapters of each log answer."""
        return sorted(
            outage.lost + 2 * order * image
            for outage in self.outages
            for order in range(1, called + 1)
        )

    def in_training(self) -> list[float]:
        return sorted(outage.lost + outage.replay for outage in self.outages)

    def lost_seconds(self) -> float:
        """Returns how long one daemon would compute what a run loses."""
        return sum(one.lost + one.replay for one in self.outages) / self.seeds


def simulate(costs: Costs, standbys: int, scenario: Scenario, seeds: int) -> Result:
    outages: list[Outage] = []
    whole, takes, refused_swaps = 0.0, 0, 0
    for seed in range(seeds):
        fleet = Fleet(costs, standbys, seed)
        fleet.run(BEFORE + fleet.random.uniform(0, costs.beat))
        begin = fleet.now
        scenario.begin(fleet)
        fleet.run_until_whole(MOST_WHOLE)
        outages += [
            dataclasses.replace(one, begin=one.begin - begin) for one in fleet.outages
        ]
        whole = max(whole, fleet.now - begin)
        takes += len(fleet.takes)
        refused_swaps += fleet.refused_swaps
    return Result(outages, seeds, whole, takes, refused_swaps)


@dataclass(frozen=True)
class Row:
    """A scenario's results by the number of standbys."""

    scenario: Scenario
    costs: Costs
    results: dict[int, Result]

    @property
    def is_update(self) -> bool:
        return self.scenario.begin is Fleet.update

    def unchanged(self, standbys: int) -> list[float]:
        return self.results[standbys].unchanged(self.costs.image, 1)


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest of sorted values that at least this share of them
    reaches."""
    return values[max(0, -int(-share * len(values) // 1) - 1)]


def figures(costs: Costs, result: Result) -> dict[str, float]:
    training = result.in_training()
    unchanged = result.unchanged(costs.image, 1)
    called = result.unchanged(costs.image, costs.called)
    lost = result.lost_seconds()
    return {
        "unchanged_p50": statistics.median(unchanged),
        "unchanged_p99": percentile(unchanged, 0.99),
        "unchanged_most": unchanged[-1],
        "all_called_p99": percentile(called, 0.99),
        "training_p99": percentile(training, 0.99),
        "lost_daemon_seconds": lost,
        "lost_tokens": lost * costs.tokens_a_second,
        "whole_seconds": result.whole,
        "takes_a_run": result.takes / result.seeds,
        "refused_swaps_a_run": result.refused_swaps / result.seeds,
    }


def as_the_bench(costs: Costs, seeds: int) -> dict[str, list[float]]:
    """Simulates `tests/bench/run.py takeover`: two daemons with one log. It waits for
    whole seconds after the standby's first look, so that it kills near a look."""
    tiny = dataclasses.replace(costs, logs=1, commits_a_second=0, image_bytes=0)
    found: dict[str, list[float]] = {"kills": [], "stops": []}
    for seed in range(seeds):
        for how, seconds in found.items():
            fleet = Fleet(tiny, 1, seed)
            first_look = fleet.run_until_first_look()
            # It sees after 20 ms at most that the standby has looked.
            fleet.run(first_look + 8 + fleet.random.uniform(0, 0.02))
            owner = fleet.logs[0].owner
            if how == "kills":
                fleet.kill([owner], in_place=True)
            else:
                fleet.stop(owner)
            while not fleet.outages:
                fleet.run(fleet.now + 1)
            seconds.append(fleet.outages[0].lost)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    mean = statistics.mean(values)
    return {"least": min(values), "mean": mean, "most": max(values)}


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def compare(costs: Costs) -> dict[str, dict[str, dict[str, float]]]:
    """Returns what a take-over takes, simulated and measured."""
    measured = costs_module.measured_take_overs()
    simulated = as_the_bench(costs, 200)
    found = {}
    for how in simulated:
        sides = {"simulated": simulated[how], "measured": measured[how]}
        found[how] = {side: spread(values) for side, values in sides.items()}
        words = "; ".join(
            f"{side} {row['least']:.2f} to {row['most']:.2f}, mean {row['mean']:.2f} s"
            for side, row in found[how].items()
        )
        say(f"two daemons, one log, {how}: {words}")
    return found


def main() -> int:
    options = _parse()
    measured = costs_module.measured()
    compared = compare(measured)
    costs = dataclasses.replace(measured, **dict(options.set))
    rows, found = [], {}
    for name, scenario in SCENARIOS.items():
        seeds = max(1, int(scenario.seeds * options.share))
        results = {
            standbys: simulate(costs, standbys, scenario, seeds)
            for standbys in STANDBYS
        }
        rows.append(Row(scenario, costs, results))
        found[name] = {
            f"{standbys} standbys": figures(costs, result)
            for standbys, result in results.items()
        }
        for standbys, row in found[name].items():
            say(f"{name}, {standbys}: {_sentence(row)}")
    if options.plot:
        import pictures

        pictures.draw(rows, MOST_SECONDS, options.plot)
    _emit(options, costs, found, compared)
    return 0


def _sentence(row: dict[str, float]) -> str:
    return (
        f"an unchanged adapter answers after {row['unchanged_p50']:.1f} s (p50), "
        f"{row['unchanged_p99']:.1f} s (p99), all that are called after "
        f"{row['all_called_p99']:.1f} s (p99), those in training after "
        f"{row['training_p99']:.1f} s (p99); lost {row['lost_daemon_seconds']:.0f} "
        f"daemon seconds, {row['lost_tokens'] / 1e6:.2f} M tokens; all processes are "
        f"back after {row['whole_seconds']:.0f} s"
    )


def _emit(
    options: argparse.Namespace,
    costs: Costs,
    rows: dict[str, Any],
    compared: dict[str, Any],
) -> None:
    sys.path[:0] = [str(TESTS / folder) for folder in ("bench", "oracle")]
    sys.path.append(str(TESTS.parent / "client" / "python"))
    import report

    report.emit_ratios(
        "fleet_simulation",
        options,
        ours=rows,
        peer={"one take-over": compared},
        ratio={
            f"seconds from one death to an unchanged adapter, p99, {standbys}": (
                report.ratio(row["unchanged_p99"], at_most=MOST_SECONDS)
            )
            for standbys, row in rows["one process"].items()
        },
        config={"costs": costs_module.described(costs), "set": dict(options.set)},
    )


def _cost(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in costs_module.WHY:
        raise argparse.ArgumentTypeError(f"{name}: no cost has this name")
    whole = name in ("logs", "adapters", "looks_at_once", "called")
    return name, int(value) if whole else float(value)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, help="file of the picture, .svg or .png")
    parser.add_argument("--output", type=Path, help="also write the JSON line here")
    one = f"another value for one of {', '.join(costs_module.WHY)}"
    parser.add_argument(
        "--set", type=_cost, action="append", default=[], metavar="NAME=VALUE", help=one
    )
    share = "of the seeds, for a quick look"
    parser.add_argument("--share", type=float, default=1.0, help=share)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
