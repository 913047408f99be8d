"""Daemons of a fleet by discrete events: they beat, look, take logs, die and return.

The store has a manifest for each log. Its ETag is here the epoch, the number of beats
and whether the log was released. The rules are those of src/log/bucket: an owner that
was not seen to beat for a time counts as dead, a standby tries all logs that it may
take, in order, until it has one, and the swap of a manifest that has changed fails.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from costs import Costs

FOREVER = float("inf")
# What a process may do about a log; the highest first (LogClaim in log_owner.h).
NONE, OWNER_IS_DEAD, FREE, OWN = range(4)


class ETag(NamedTuple):
    epoch: int
    beats: int
    released: bool


@dataclass
class Process:
    name: str  # --instance: one that restarts in place has it again.
    generation: int = 0  # Of the binary, which an update raises.
    log: Log | None = None
    ends: float = FOREVER
    # By log: the ETag that it saw, and since when.
    seen: dict[int, tuple[ETag, float]] = field(default_factory=dict)
    looked: float = -FOREVER


@dataclass
class Log:
    number: int
    owner: Process
    epoch: int = 1
    taken: float = 0.0  # When its owner took it, which is when its beats begin.
    released: bool = False

    def etag(self, now: float, beat: float) -> ETag:
        alive = min(now, self.owner.ends)
        return ETag(self.epoch, int((alive - self.taken) / beat), self.released)


@dataclass(frozen=True)
class Outage:
    """A log's time without an owner that serves, `lost`, and then the time until the
    last of its adapters in training is ready, `replay`."""

    log: int
    begin: float
    lost: float
    replay: float


class Fleet:
    """Has one owner for each log, and standbys. Looks and beats have random phases."""

    def __init__(self, costs: Costs, standbys: int, seed: int) -> None:
        self.costs, self.standbys = costs, standbys
        self.random = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._num_processes = 0
        self.outages: list[Outage] = []
        self.unserved: dict[int, float] = {}  # By log: since when.
        self._updating = False
        # When a log was taken, which, from whom and by whom.
        self.takes: list[tuple[float, int, str, str]] = []
        self.refused_swaps = 0  # Another process was faster, or the owner lives.
        self.logs = [
            Log(number, self.new_process(), taken=-self.random.uniform(0, costs.beat))
            for number in range(costs.logs)
        ]
        for log in self.logs:
            log.owner.log = log
        self.processes = [log.owner for log in self.logs]
        for _ in range(standbys):
            self.stand_by(self.new_process(), self.random.uniform(0, costs.look))

    def new_process(self, generation: int = 0) -> Process:
        self._num_processes += 1
        return Process(f"p{self._num_processes}", generation)

    def at(self, time: float, event: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, event))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until

    def run_until_whole(self, limit: float) -> None:
        """Ends when all logs are served, all processes are back, and an update has
        ended. Raises if that takes longer than `limit`."""
        most = self.now + limit
        whole = self.costs.logs + self.standbys
        while self.unserved or self._updating or len(self.processes) < whole:
            if self.now > most:
                raise RuntimeError(
                    f"after {limit:g} s nobody serves the logs "
                    f"{sorted(self.unserved)}, and {len(self.processes)} of {whole} "
                    "processes are there"
                )
            self.run(self.now + 1)

    def run_until_first_look(self) -> float:
        """Returns when the first standby has looked, with one standby."""
        while not self._events or self.standing_by()[0].looked < 0:
            self.run(self._events[0][0])
        return self.now

    def standing_by(self) -> list[Process]:
        return [process for process in self.processes if process.log is None]

    # Requests.

    def seconds(self, mean: float) -> float:
        return self.random.expovariate(1 / self._mean(mean))

    def _mean(self, of_idle_store: float) -> float:
        return self.costs.request(of_idle_store, len(self.processes) - self.costs.logs)

    def _seconds_of_look(self) -> float:
        logs, threads = self.costs.logs, self.costs.looks_at_once
        rate = 1 / self._mean(self.costs.get)
        requests = [self.random.expovariate(rate) for _ in range(logs)]
        return max(sum(requests[thread::threads]) for thread in range(threads))

    # Standbys.

    def stand_by(self, process: Process, first_look: float) -> None:
        if process not in self.processes:
            self.processes.append(process)
        self.at(first_look, lambda: self._look(process))

    def _look(self, process: Process) -> None:
        if process.ends <= self.now or process.log is not None:
            return
        begin = self.now
        etags = [log.etag(begin, self.costs.beat) for log in self.logs]
        self.at(begin + self._seconds_of_look(), lambda: self._judge(process, etags))

    def _judge(self, process: Process, etags: list[ETag]) -> None:
        """Finds the logs that a process may take, and tries them in turn."""
        now = self.now
        is_late = now - process.looked > self.costs.most_gap
        process.looked = now
        claims = []
        for log, etag in zip(self.logs, etags, strict=True):
            if is_late or process.seen[log.number][0] != etag:
                process.seen[log.number] = (etag, now)
            claims.append(self._claim(process, log, etag))
        order = sorted(
            (number for number, claim in enumerate(claims) if claim != NONE),
            key=lambda number: -claims[number],
        )
        self._try(process, [(self.logs[number], etags[number]) for number in order])

    def _claim(self, process: Process, log: Log, etag: ETag) -> int:
        if log.owner.name == process.name:
            return OWN
        if etag.released:
            return FREE
        since = process.seen[log.number][1]
        return OWNER_IS_DEAD if self.now - since >= self.costs.patience else NONE

    def _try(self, process: Process, wanted: list[tuple[Log, ETag]]) -> None:
        if process.ends <= self.now:
            return
        if not wanted:
            next_look = self.now + self.costs.look
            self.at(next_look, lambda: self._look(process))
            return
        log, etag = wanted[0]
        # It looks for objects that are missing before it swaps the manifest.
        costs = self.costs
        check = self.seconds(costs.get) + 2 * self.seconds(costs.list)
        swap = self.now + check + self.seconds(costs.put)
        self.at(swap, lambda: self._swap(process, log, etag, wanted[1:]))

    def _swap(
        self, process: Process, log: Log, etag: ETag, others: list[tuple[Log, ETag]]
    ) -> None:
        if process.ends <= self.now:
            return
        costs = self.costs
        if log.etag(self.now, costs.beat) != etag:
            self.refused_swaps += 1
            after = self.now + self.seconds(costs.get)
            self.at(after, lambda: self._try(process, others))
            return
        self.takes.append((self.now, log.number, log.owner.name, process.name))
        if log.owner.ends > self.now and not log.released:
            self.end(log.owner)  # Its next record finds the seal.
        was_released = log.released
        log.owner, log.taken, log.released = process, self.now, False
        log.epoch += 1
        process.log = log
        seal = self.seconds(costs.list) + self.seconds(costs.put)
        serves = self.now + seal + self.seconds(costs.get) + costs.restore
        self.at(serves, lambda: self._serve(process, log, was_released))

    def _serve(self, process: Process, log: Log, was_released: bool) -> None:
        if process.ends <= self.now or log.owner is not process:
            return
        begin = self.unserved.pop(log.number)
        costs = self.costs
        replay = (costs.in_training + costs.called) * costs.image
        if not was_released:
            replay += self.random.uniform(0, costs.most_replay)
        self.outages.append(Outage(log.number, begin, self.now - begin, replay))

    # Ends.

    def end(self, process: Process) -> None:
        process.ends = self.now
        self.processes.remove(process)
        if process.log is not None and process.log.owner is process:
            self.unserved.setdefault(process.log.number, self.now)

    def kill(self, processes: Iterable[Process], in_place: bool) -> None:
        """Kills processes. A supervisor starts each again, in place or elsewhere."""
        for process in list(processes):
            self.end(process)
            comes = Process(process.name) if in_place else self.new_process()
            self.come(comes, in_place)

    def come(self, process: Process, in_place: bool) -> None:
        # So that those which died together do not look together.
        first = self.now + self.costs.comes_after(in_place)
        first += self.random.uniform(0, self.costs.look)
        self.at(first, lambda: self.stand_by(process, first))

    def stop(self, process: Process) -> None:
        """Ends a process by SIGTERM. An owner writes a snapshot, and releases its
        log."""
        log = process.log
        if log is None:
            self.end(process)
            return
        self.unserved.setdefault(log.number, self.now)
        release = self.now + self.costs.last_snapshot + self.seconds(self.costs.put)
        self.at(release, lambda: self._release(process, log))

    def _release(self, process: Process, log: Log) -> None:
        if process.ends > self.now and log.owner is process:
            log.released = True
            self.end(process)

    def update(self) -> None:
        """Replaces all processes, one after another: a new one comes, and when it
        stands by, an old one ends. Returns at once; the events do it."""
        self._updating = True
        self._replace_one()

    def _replace_one(self) -> None:
        if all(process.generation for process in self.processes):
            self._updating = False
            return
        new = self.new_process(generation=1)
        self.come(new, in_place=False)
        self._end_one_when_stands_by(new)

    def _end_one_when_stands_by(self, new: Process) -> None:
        if new not in self.processes:
            again = self.now + self.costs.look
            self.at(again, lambda: self._end_one_when_stands_by(new))
            return
        old = self.random.choice([one for one in self.processes if not one.generation])
        self.stop(old)
        self._replace_when_ended(old)

    def _replace_when_ended(self, old: Process) -> None:
        if old.ends <= self.now:
            self._replace_one()
            return
        again = self.now + self.costs.look
        self.at(again, lambda: self._replace_when_ended(old))
