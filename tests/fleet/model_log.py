"""Explores all schedules of the take-over of one log in an object store, within bounds.

The log is objects at places (1, 2, ...), which are only ever created, and a
manifest, which is only ever swapped. An object is a seal or a group of records with
consecutive sequence numbers. The record of step n has sequence n. Any daemon may
suspect the owner at any time, may pause between any two requests, and may crash. A
request may be executed without an answer. The network may also keep a copy of a
request, and execute it later any number of times, even if the sender has crashed.
(For a swap of the manifest this adds nothing: it succeeds once, and only while the
manifest is unchanged, so the sender may as well have crashed after it.)

The promise: at any moment, what the next owner would recover has each step once and
in order, and among them every step that was acknowledged.

Prints how many states there are, or the shortest schedule that breaks the promise;
then the exit status is 3. With --mutant the design lacks one of its rules.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from model_command import run

MUTANTS = {
    "delete-seals": "the cut of the log removes seals, too",
    "early-snapshot": "a snapshot counts before all of its records are durable",
    "no-recheck": "an owner does not read the manifest again after its seal",
    "any-412": "after a lost answer, 412 counts as success without a look",
    "no-seal": "a new owner writes no seal",
    "skip-to-end": "an owner writes at the end of what it read, not after its seal",
}
MAX_GROUP = 2  # Records in one object.
PROGRESS_SECONDS = 5

# Phases of a daemon.
IDLE, READ, TAKEN, LISTED, SEALED, CHECKED, OWNER = range(7)
# What is known of a daemon's latest PUT, if it has not succeeded.
LOST, TAKEN_PLACE = 1, 2


class Item(NamedTuple):
    """An object of the log. A seal has no steps."""

    epoch: int
    steps: tuple[int, ...] = ()  # For each record the epoch in which it was applied.
    first: int = 0  # Sequence of the first record.


# Places and their objects, in order.
Log = tuple[tuple[int, Item], ...]


class Request(NamedTuple):
    """A request of which the network has a copy."""

    place: int
    item: Item | None  # None: deletes the place.


class Manifest(NamedTuple):
    epoch: int = 0
    place: int = 1  # The log is read from here.
    steps: tuple[int, ...] = ()  # The snapshot, as in Item.


class Daemon(NamedTuple):
    phase: int = IDLE
    epoch: int = 0
    fresh: bool = False  # Whether the ETag that it knows is still the manifest's.
    place: int = 0  # Where it writes next.
    put: int = 0
    applied: tuple[int, ...] = ()
    durable: int = 0  # So many of the applied steps are in the log.
    group: int = 0  # Records in the object of its latest PUT, until this succeeds.
    copied: int = 0  # Steps in the copy that becomes the next snapshot; 0: no copy.
    copy_place: int = 0  # From where the log goes on after the copy; 0: not known.
    cut: int = 0  # Records below this place may be deleted.


class World(NamedTuple):
    log: Log
    manifest: Manifest
    daemons: tuple[Daemon, ...]
    acknowledged: tuple[tuple[int, int], ...] = ()  # Step and epoch.
    kept: tuple[Request, ...] = ()
    crashes: int = 0


class Bounds(NamedTuple):
    daemons: int = 2
    steps: int = 3
    epochs: int = 3
    crashes: int = 1
    copies: int = 0


Move = tuple[str, World]
BORN = Daemon()


def replay(log: Log, place: int, steps: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the steps of a snapshot and of the log from a place on, or None if the
    log's sequences are not consecutive."""
    highest, known = 0, len(steps)
    for at, item in log:
        if at < place:
            continue
        void = item.epoch < highest
        highest = max(highest, item.epoch)
        for sequence, step in enumerate(item.steps, item.first):
            if void or sequence <= known:
                continue
            if sequence != len(steps) + 1:
                return None
            steps += (step,)
    return steps


@functools.cache
def problem(
    log: Log, manifest: Manifest, acknowledged: tuple[tuple[int, int], ...]
) -> str | None:
    """Says how the promise is broken, if it is."""
    steps = replay(log, manifest.place, manifest.steps)
    if steps is None:
        return "a start would find a step twice, or a gap"
    for number, epoch in acknowledged:
        if steps[number - 1 : number] != (epoch,):
            return f"step {number}, acknowledged in epoch {epoch}, is lost"
    return None


def last_place(world: World) -> int:
    return world.log[-1][0] if world.log else 0


class Model:
    """The moves that are possible in a world. Methods yield each with its name."""

    def __init__(self, bounds: Bounds, mutant: str | None) -> None:
        self.bounds, self.mutant = bounds, mutant

    def first(self) -> World:
        return World((), Manifest(), (BORN,) * self.bounds.daemons)

    def moves(self, world: World) -> Iterator[Move]:
        for index, daemon in enumerate(world.daemons):
            for what, after in self.daemon_moves(world, index, daemon):
                yield f"{'ABC'[index]}: {what}", after
        for place, item in world.kept:
            if item is None:
                yield f"a late DELETE of {place}", delete(world, place)
            else:
                yield f"a late PUT of {place}", put(world, place, item)

    def daemon_moves(self, world: World, index: int, daemon: Daemon) -> Iterator[Move]:
        turn = Turn(self, world, index, daemon)
        if daemon.phase >= TAKEN and world.crashes < self.bounds.crashes:
            crashed = world._replace(crashes=world.crashes + 1)
            yield "crashes", turn.then(BORN, crashed)
        if daemon.phase == OWNER:
            yield from turn.serve()
        else:
            yield from turn.take_over()


def put(world: World, place: int, item: Item) -> World:
    """Creates an object, unless the place is taken."""
    if any(at == place for at, _ in world.log):
        return world
    return world._replace(log=tuple(sorted((*world.log, (place, item)))))


def delete(world: World, place: int) -> World:
    return world._replace(log=tuple(one for one in world.log if one[0] != place))


def outdated(daemon: Daemon) -> Daemon:
    """Returns the daemon after another one has swapped the manifest. A swap of its
    own will fail, so it is as if it had not read the manifest, or made no copy."""
    if daemon.phase == READ:
        return BORN
    return daemon._replace(fresh=False, copied=0, copy_place=0)


class Turn:
    """The moves of one daemon."""

    def __init__(self, model: Model, world: World, index: int, daemon: Daemon) -> None:
        self.bounds, self.mutant = model.bounds, model.mutant
        self.world, self.index, self.daemon = world, index, daemon

    def then(self, daemon: Daemon, world: World | None = None) -> World:
        world = world or self.world
        before = world.daemons[: self.index]
        after = world.daemons[self.index + 1 :]
        return world._replace(daemons=(*before, daemon, *after))

    def swap(self, manifest: Manifest) -> World:
        """Swaps the manifest, of which no other daemon has the ETag any more."""
        daemons = tuple(outdated(other) for other in self.world.daemons)
        return self.world._replace(manifest=manifest, daemons=daemons)

    def keep(self, place: int, item: Item | None) -> World | None:
        """Returns the world in which the network has a copy of a request."""
        kept = self.world.kept
        request = Request(place, item)
        if len(kept) >= self.bounds.copies or request in kept:
            return None
        return self.world._replace(kept=(*kept, request))

    def take_over(self) -> Iterator[Move]:
        world, daemon = self.world, self.daemon
        manifest = world.manifest
        if daemon.phase == IDLE:
            if manifest.epoch < self.bounds.epochs:
                yield "reads the manifest", self.then(Daemon(READ, fresh=True))
        elif daemon.phase == READ:
            epoch = manifest.epoch + 1
            taken = Daemon(TAKEN, epoch, fresh=True, cut=manifest.place)
            after = self.swap(manifest._replace(epoch=epoch))
            yield f"takes the manifest with epoch {epoch}", self.then(taken, after)
        elif daemon.phase == TAKEN:
            place = max(last_place(world) + 1, daemon.cut)
            what = f"lists the log: {place} is free"
            yield what, self.then(daemon._replace(phase=LISTED, place=place))
        elif daemon.phase == LISTED:
            yield from self.seal()
        elif daemon.phase == SEALED:
            if not daemon.fresh and self.mutant != "no-recheck":
                yield "reads the manifest again: not its own", self.then(BORN)
                return
            # Without the look, the manifest may be another's.
            checked = daemon._replace(
                phase=CHECKED, cut=manifest.place, applied=manifest.steps
            )
            yield "reads the manifest again", self.then(checked)
        elif daemon.phase == CHECKED:
            yield self.read()

    def seal(self) -> Iterator[Move]:
        daemon, place = self.daemon, self.daemon.place
        sealed = daemon._replace(phase=SEALED, place=place + 1, put=0)
        if self.mutant == "no-seal":
            yield "writes no seal", self.then(sealed._replace(place=place))
        elif daemon.put == TAKEN_PLACE:
            there = dict(self.world.log).get(place)
            if there is None or there.epoch > daemon.epoch:
                yield f"{place} has a higher epoch: it gives up", self.then(BORN)
            elif there == Item(daemon.epoch):
                yield f"{place} has its own seal", self.then(sealed)
            else:
                on = daemon._replace(place=place + 1, put=0)
                yield f"{place} has a lower epoch: it goes on", self.then(on)
        else:
            yield from self.put(Item(daemon.epoch), sealed, self.world, f"seal {place}")

    def put(
        self, item: Item, done: Daemon, acknowledged: World, what: str
    ) -> Iterator[Move]:
        """The moves that send a PUT. `done` and `acknowledged` are what its success
        makes of daemon and world."""
        daemon, place = self.daemon, self.daemon.place
        daemon = daemon._replace(group=len(item.steps))
        lost = daemon._replace(put=LOST)
        after = put(acknowledged, place, item)
        if after is not acknowledged:
            yield f"{what}: 200", self.then(done, after)
            after = put(self.world, place, item)
            yield f"{what}: the answer is lost", self.then(lost, after)
        elif self.mutant == "any-412" and self.daemon.put == LOST and item.steps:
            yield f"{what}: 412, taken for success", self.then(done, after)
        else:
            yield f"{what}: 412", self.then(daemon._replace(put=TAKEN_PLACE))
            yield f"{what}: the answer (412) is lost", self.then(lost)
        with_copy = self.keep(place, item)
        if with_copy:
            yield f"{what}: the network keeps it", self.then(lost, with_copy)

    def read(self) -> Move:
        daemon = self.daemon
        steps = replay(self.world.log, daemon.cut, daemon.applied)
        if steps is None or len(steps) < len(daemon.applied):
            return "reads a log with a gap, and ends", self.then(BORN)
        # What is behind the seal by now is a later owner's, whose seal must not be
        # jumped over.
        place = daemon.place
        if self.mutant == "skip-to-end":
            place = max(place, last_place(self.world) + 1)
        owner = daemon._replace(
            phase=OWNER, place=place, applied=steps, durable=len(steps)
        )
        return f"owns the log with {len(steps)} steps", self.then(owner)

    def serve(self) -> Iterator[Move]:
        daemon = self.daemon
        number = len(daemon.applied) + 1
        if number <= self.bounds.steps:
            applied = daemon._replace(applied=(*daemon.applied, daemon.epoch))
            yield f"applies step {number}", self.then(applied)
        if daemon.put == TAKEN_PLACE:
            yield self.look()
        elif daemon.group:
            yield from self.commit(daemon.group)
        else:
            waiting = len(daemon.applied) - daemon.durable
            for size in range(1, min(waiting, MAX_GROUP) + 1):
                yield from self.commit(size)
        yield from self.snapshot()
        yield from self.cut()

    def group(self, size: int) -> Item:
        start = self.daemon.durable
        steps = self.daemon.applied[start : start + size]
        return Item(self.daemon.epoch, steps, start + 1)

    def success(self, size: int) -> tuple[Daemon, World]:
        """Returns the daemon and the world after the group at `place` is durable."""
        daemon, world = self.daemon, self.world
        durable, place = daemon.durable + size, daemon.place + 1
        copy_place = daemon.copy_place
        if daemon.durable < daemon.copied <= durable:
            # The object may hold records that the copy does not have.
            copy_place = place if durable == daemon.copied else daemon.place
        done = daemon._replace(
            place=place, put=0, durable=durable, group=0, copy_place=copy_place
        )
        steps = enumerate(self.group(size).steps, daemon.durable + 1)
        known = tuple(sorted({*world.acknowledged, *steps}))
        return done, world._replace(acknowledged=known)

    def commit(self, size: int) -> Iterator[Move]:
        done, acknowledged = self.success(size)
        first = self.daemon.durable + 1
        steps = f"step {first}" if size == 1 else f"steps {first} and {first + 1}"
        what = f"PUT of {steps} at {self.daemon.place}"
        yield from self.put(self.group(size), done, acknowledged, what)

    def look(self) -> Move:
        """Looks at the object that has the place of the group."""
        daemon, place = self.daemon, self.daemon.place
        there = dict(self.world.log).get(place)
        if there == self.group(daemon.group):
            return f"{place} has its own group: success", self.then(
                *self.success(daemon.group)
            )
        if there is None or there.epoch >= daemon.epoch:
            found = "is gone" if there is None else f"has epoch {there.epoch}"
            return f"{place} {found}: it is fenced", self.then(BORN)
        on = daemon._replace(place=place + 1, put=0)
        return f"{place} has a lower epoch: the next place", self.then(on)

    def snapshot(self) -> Iterator[Move]:
        daemon, manifest = self.daemon, self.world.manifest
        steps = len(daemon.applied)
        if not daemon.fresh:
            yield "finds another's manifest (412): it is fenced", self.then(BORN)
            return
        if not daemon.copied and steps > len(manifest.steps):
            known = daemon.place if daemon.durable == steps else 0
            copy = daemon._replace(copied=steps, copy_place=known)
            yield f"copies its state after step {steps}", self.then(copy)
        if not daemon.copied:
            return
        place = daemon.copy_place
        if not place and self.mutant == "early-snapshot":
            place = daemon.place + 1  # What waits is taken to be the next object.
        if not place:
            return
        new = Manifest(daemon.epoch, place, daemon.applied[: daemon.copied])
        done = daemon._replace(copied=0, copy_place=0, cut=place)
        what = f"names the snapshot after step {daemon.copied}, the log from {place} on"
        yield what, self.then(done, self.swap(new))

    def cut(self) -> Iterator[Move]:
        last = last_place(self.world)
        for place, item in self.world.log:
            if place >= min(self.daemon.cut, last):
                return
            if item.steps or self.mutant == "delete-seals":
                yield f"deletes {place}", delete(self.world, place)
                after = self.keep(place, None)
                if after:
                    yield f"DELETE of {place}: the network keeps it", after
                return


def in_order(world: World) -> World:
    """Returns the world that stands for all that differ only in the order of the
    daemons, which are alike."""
    daemons = tuple(sorted(world.daemons))
    return world if daemons == world.daemons else world._replace(daemons=daemons)


def explore(model: Model, name: str) -> bool:
    """Returns whether the promise holds in every world that can be reached."""
    start = model.first()
    came: dict[World, World | None] = {start: None}
    front = [start]
    tick = time.monotonic() + PROGRESS_SECONDS
    moves = 0
    while front:
        behind, front = front, []
        for world in behind:
            for _, after in model.moves(world):
                moves += 1
                after = in_order(after)
                if after in came:
                    continue
                came[after] = world
                front.append(after)
                broken = problem(after.log, after.manifest, after.acknowledged)
                if broken:
                    print(f"{name}: broken, found among {len(came)} states: {broken}")
                    print_schedule(model, came, after)
                    return False
            if time.monotonic() > tick:
                tick += PROGRESS_SECONDS
                print(f"{name}: {len(came)} states so far", file=sys.stderr)
    print(f"{name}: holds in all {len(came)} states and {moves} moves")
    return True


def print_schedule(
    model: Model, came: dict[World, World | None], broken: World
) -> None:
    path = []
    step: World | None = broken
    while step:
        path.append(step)
        step = came[step]
    # Goes the same way with daemons that keep their names.
    world = model.first()
    for number, goal in enumerate(path[-2::-1], 1):
        what, world = next(m for m in model.moves(world) if in_order(m[1]) == goal)
        print(f"  {number:2} {what}")


if __name__ == "__main__":
    sys.exit(run(__doc__, MUTANTS, Bounds, Model, explore))
