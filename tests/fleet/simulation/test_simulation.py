"""Tests the rules that the simulated fleet keeps, with few daemons, and that it agrees
with the take-overs that were measured."""

from __future__ import annotations

import dataclasses
import statistics

import costs as costs_module
import pytest
import simulate
from costs import Costs
from events import Fleet, Process

MEASURED = costs_module.measured()
FEW = dataclasses.replace(MEASURED, logs=4, adapters=400)
SEEDS = range(20)
# The take-over of a log, over the time until its owner counts as dead: two looks, the
# requests, and the start.
MORE_SECONDS = 2 * FEW.look + FEW.restore + 0.5


def started(costs: Costs, standbys: int, seed: int) -> Fleet:
    fleet = Fleet(costs, standbys, seed)
    fleet.run(10 + fleet.random.uniform(0, costs.beat))
    return fleet


def owners(fleet: Fleet, count: int) -> list[Process]:
    return fleet.random.sample([log.owner for log in fleet.logs], count)


def run_watched(fleet: Fleet, seconds: float) -> None:
    """Runs in small steps, and checks at each that a log has one owner."""
    end = fleet.now + seconds
    while fleet.now < end:
        fleet.run(fleet.now + 0.05)
        with_log = [process for process in fleet.processes if process.log is not None]
        for process in with_log:
            assert process.log is not None and process.log.owner is process
        assert len(with_log) >= len(fleet.logs) - len(fleet.unserved)
        names = [process.name for process in fleet.processes]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_log_has_one_owner_and_all_are_owned_at_the_end(seed: int) -> None:
    fleet = started(FEW, 2, seed)
    fleet.kill(owners(fleet, 3), in_place=seed % 2 == 0)
    run_watched(fleet, 1.5 * FEW.comes_after(in_place=False))
    assert not fleet.unserved
    assert len({log.owner.name for log in fleet.logs}) == FEW.logs
    assert all(log.owner in fleet.processes for log in fleet.logs)
    assert len(fleet.processes) == FEW.logs + 2


@pytest.mark.parametrize("seed", SEEDS)
def test_owners_that_live_keep_their_logs(seed: int) -> None:
    fleet = started(FEW, 2, seed)
    fleet.run(200)
    assert fleet.takes == []
    assert fleet.refused_swaps == 0


@pytest.mark.parametrize("in_place", [True, False])
def test_without_a_standby_a_log_waits_for_a_process(in_place: bool) -> None:
    comes = FEW.comes_after(in_place)
    for seed in SEEDS:
        fleet = started(FEW, 0, seed)
        dead = owners(fleet, 2)
        fleet.kill(dead, in_place)
        fleet.run_until_whole(300)
        assert min(one.lost for one in fleet.outages) >= comes
        # One that restarts in place takes its own log, and at once.
        if in_place:
            assert {take[3] for take in fleet.takes} == {one.name for one in dead}
            assert max(one.lost for one in fleet.outages) < comes + MORE_SECONDS


@pytest.mark.parametrize("seed", SEEDS)
def test_each_standby_takes_one_log_of_several_that_died(seed: int) -> None:
    fleet = started(FEW, 2, seed)
    fleet.kill(owners(fleet, 3), in_place=False)
    fleet.run(fleet.now + FEW.patience + MORE_SECONDS)
    assert len(fleet.unserved) == 1
    assert len({take[3] for take in fleet.takes}) == 2
    lost = [outage.lost for outage in fleet.outages]
    assert min(lost) >= FEW.patience - FEW.beat
    assert max(lost) <= FEW.patience + MORE_SECONDS


def test_two_standbys_that_look_at_once_get_different_logs() -> None:
    fleet = Fleet(FEW, 0, seed=1)
    together = [fleet.new_process() for _ in range(2)]
    for process in together:
        fleet.stand_by(process, first_look=0.5)
    for log in fleet.logs:
        log.taken = 0.0  # So that all owners beat together, too.
    fleet.run(10)
    fleet.kill(owners(fleet, 2), in_place=False)
    fleet.run(20)
    # Who was slower tries the next log without another look.
    assert fleet.takes[1][0] - fleet.takes[0][0] < FEW.look / 2
    assert fleet.refused_swaps >= 1
    assert {take[3] for take in fleet.takes} == {one.name for one in together}


def test_a_standby_that_dies_as_it_takes_a_log_is_followed_by_another() -> None:
    fleet = started(FEW, 2, 4)
    fleet.kill(owners(fleet, 1), in_place=False)
    while not fleet.takes:
        fleet.run(fleet.now + 0.05)
    log = fleet.logs[fleet.takes[0][1]]
    fleet.kill([log.owner], in_place=False)
    run_watched(fleet, FEW.patience + MORE_SECONDS)
    assert log.owner in fleet.processes
    assert [outage.log for outage in fleet.outages] == [log.number]
    assert fleet.outages[0].lost >= 2 * (FEW.patience - FEW.beat)


@pytest.mark.parametrize("standbys", [1, 2])
def test_an_update_replaces_all_and_stops_one_log_at_a_time(standbys: int) -> None:
    fleet = started(FEW, standbys, 3)
    fleet.update()
    for _ in range(1000):
        fleet.run(fleet.now + 1)
        assert len(fleet.unserved) <= 1
        assert len(fleet.processes) <= FEW.logs + standbys + 1
    assert all(process.generation == 1 for process in fleet.processes)
    assert not fleet.unserved
    # A clean end needs nobody's patience.
    most = FEW.last_snapshot + MORE_SECONDS
    assert max(one.lost for one in fleet.outages) < most


def test_a_slow_store_ends_no_owner() -> None:
    slow = dataclasses.replace(FEW, get=0.2, put=0.2, list=0.2)
    fleet = started(slow, 2, 5)
    fleet.run(100)
    assert fleet.takes == []


def test_it_agrees_with_take_overs_that_were_measured() -> None:
    measured = costs_module.measured_take_overs()
    for how, seconds in simulate.as_the_bench(MEASURED, 100).items():
        simulated = statistics.mean(seconds)
        assert simulated == pytest.approx(statistics.mean(measured[how]), abs=0.5), how


def test_each_cost_says_where_it_comes_from() -> None:
    assert set(costs_module.WHY) == set(dataclasses.asdict(MEASURED))


def test_one_death_in_the_whole_fleet_meets_the_target() -> None:
    scenario = simulate.SCENARIOS["one process"]
    result = simulate.simulate(MEASURED, 1, scenario, seeds=30)
    figures = simulate.figures(MEASURED, result)
    assert figures["unchanged_p99"] <= simulate.MOST_SECONDS
    assert figures["takes_a_run"] == 1
