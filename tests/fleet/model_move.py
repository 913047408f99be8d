"""Explores all schedules of the moves of one adapter between two logs, within bounds.

A log is what model_log.py shows it to be: only the owner of the latest epoch can add a
record, and the next owner begins with all of them. The directory has one entry for the
adapter, which names a log. It is only ever swapped or deleted under the condition that
it has not changed, and no two entries are equal, so each has a number. It also says
when it was born, which a swap keeps. Each log has a mailbox, an object for one message.

A move from A to B: A holds its line, records `leaving` with the entry's number, and
puts a message into B's mailbox. B takes the message if the entry still has its number,
records `arriving`, and swaps the entry. Then A records `left`, and B records `own` and
serves. An owner of A that gives up swaps the entry for another one of its own log, and
records `stayed`. Who cannot swap reads whose the entry is, and when it was born. An
owner that starts goes on where the log of the one before it ends.

Any owner may lose its log to a new one at any time, and is a zombie then. It goes on
with what it remembers: its records are refused, its other requests are not. A request
may be executed without an answer. Messages are read late, twice, and by later owners.
Clients delete the adapter, and create one with its name.

The promise: the adapter has one owner at most that serves it, with all steps that were
acknowledged. One that was deleted stays deleted. And nothing ends in a dead end: the
adapter can be served again, or it is deleted, and the mailboxes can become empty.

Prints how many states there are, or the shortest schedule that breaks the promise;
then the exit status is 3. With --mutant the design lacks one of its rules.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import NamedTuple

from model_command import run

MUTANTS = {
    "no-hold": "A acknowledges steps after `leaving`",
    "no-leaving": "A records nothing before the move",
    "no-rewrite": "an owner of A that gives up reads the entry, and does not swap it",
    "stay-blind": "an owner of A that gives up does not look at the entry",
    "early-own": "B serves before it has swapped the entry",
    "early-swap": "B swaps the entry before `arriving` is durable",
    "no-number": "B swaps the entry whatever number it has",
    "no-look": "B takes a message without a look at the entry's number",
    "any-swap": "B counts each entry of its log as its swap",
    "any-stay": "A counts each entry of its log as a sign that the adapter stayed",
    "reborn": "a claim that swaps an entry does not keep when it was born",
    "free-arriving": "a claim that fails frees the name of an adapter that arrives",
    "keep-refused": "B leaves a message that it refused to A alone",
}

# Phases of an owner: it does not have the adapter, or writes its first record, or
# serves it;
EMPTY, CLAIMED, SERVES = range(3)
# the adapter leaves: the message is not in the mailbox, or it is, or the owner gives
# up; then `stayed` or `left` is recorded;
LEAVES, ASKED, GIVES_UP, STAYS, LEFT = range(3, 8)
# the adapter arrives: its message is taken, `arriving` is recorded, then `own` or
# `dropped` is recorded.
TAKES, ARRIVES, OWNS, DROPS = range(8, 12)
GONE = 12
# What a zombie in another phase does next is a record, which is refused.
OF_ZOMBIES = (EMPTY, LEAVES, ASKED, GIVES_UP, ARRIVES)


class Entry(NamedTuple):
    log: int
    number: int
    born: int  # The number of the entry that was not swapped for another one.


class Message(NamedTuple):
    number: int
    steps: int
    born: int
    refused: bool = False


class Log(NamedTuple):
    """What a start finds: the phase is EMPTY, SERVES, GIVES_UP or ARRIVES."""

    phase: int = EMPTY
    number: int = 0
    steps: int = 0
    born: int = 0


class Owner(NamedTuple):
    phase: int = EMPTY
    number: int = 0
    steps: int = 0
    born: int = 0
    clean: int = 0  # The number of a message that it deletes, of a move that has ended.
    box: int = 0  # The log in whose mailbox that message is.
    frees: int = 0  # The number of an entry that it deletes; -1: it reads that first.


class World(NamedTuple):
    entry: Entry | None
    logs: tuple[Log, Log]
    boxes: tuple[Message | None, Message | None]
    # Of each log, its owners in the order of their epochs. All but the last are
    # zombies.
    owners: tuple[tuple[Owner, ...], tuple[Owner, ...]]
    last: int = 1  # The number of the latest entry.
    acknowledged: int = 1  # Steps, in which a creation counts as one.
    exists: bool = True
    moves: int = 0
    deletions: int = 0
    claims: int = 0


class Bounds(NamedTuple):
    take_overs: int = 1  # Of each log.
    moves: int = 1
    steps: int = 1
    deletions: int = 1
    claims: int = 1  # Of the name, by calls that create an adapter.


Move = tuple[str, World]


def replaced(pair: tuple, at: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*pair[:at], value, *pair[at + 1 :])


def problem(world: World) -> str | None:
    """Says how the promise is broken, if it is."""
    serving = [owners[-1] for owners in world.owners if owners[-1].phase == SERVES]
    if len(serving) > 1:
        return "two owners serve the adapter"
    if serving and not world.exists:
        return "an owner serves an adapter that was deleted"
    if serving and serving[0].steps > world.acknowledged:
        return "an owner creates a second adapter with the name"
    if serving and serving[0].steps < world.acknowledged:
        return (
            f"an owner serves with {serving[0].steps} steps, and "
            f"{world.acknowledged} are acknowledged"
        )
    return None


def is_settled(world: World) -> bool:
    """Whether no move is open, and the adapter is served or deleted."""
    phases = [owners[-1].phase for owners in world.owners]
    return world.boxes == (None, None) and (
        SERVES in phases if world.exists else phases == [EMPTY, EMPTY]
    )


class Model:
    """The moves that are possible in a world. Methods yield each with its name."""

    def __init__(self, bounds: Bounds, mutant: str | None) -> None:
        self.bounds, self.mutant = bounds, mutant

    def first(self) -> World:
        serves = Owner(SERVES, steps=1)
        logs = (Log(SERVES, steps=1), Log())
        # A has a zombie that has never had the adapter.
        owners = ((Owner(), serves), (Owner(),))
        return World(Entry(0, 1, 1), logs, (None, None), owners)

    def moves(self, world: World) -> Iterator[Move]:
        for log, owners in enumerate(world.owners):
            turn = Turn(self, world, log, len(owners) - 1)
            yield from turn.moves()
            if len(owners) < self.bounds.take_overs + (2 if log == 0 else 1):
                yield self.take_over(world, log)

    def moves_of_zombies(self, world: World) -> Iterator[Move]:
        for log, owners in enumerate(world.owners):
            for at in range(len(owners) - 1):
                yield from Turn(self, world, log, at).moves()

    def take_over(self, world: World, log: int) -> Move:
        before = world.owners[log]
        zombie = before[-1]
        if zombie.phase not in OF_ZOMBIES:
            zombie = zombie._replace(phase=GONE, number=0, steps=0, born=0)
        # It reads the manifest between its look at the entry and the deletion.
        zombie = zombie._replace(frees=max(zombie.frees, 0))
        found = world.logs[log]
        owners = (*before[:-1], zombie, Owner(*found))
        world = world._replace(owners=replaced(world.owners, log, owners))
        return f"{'AB'[log]}{len(owners)}: takes the log over", world


class Turn:
    """The moves of one owner."""

    def __init__(self, model: Model, world: World, log: int, at: int) -> None:
        self.bounds, self.mutant = model.bounds, model.mutant
        self.world, self.log, self.at = world, log, at
        self.owner = world.owners[log][at]
        self.is_zombie = at + 1 < len(world.owners[log])
        self.name = f"{'AB'[log]}{at + 1}"

    def then(self, owner: Owner, world: World | None = None) -> World:
        world = world or self.world
        owners = replaced(world.owners[self.log], self.at, owner)
        return world._replace(owners=replaced(world.owners, self.log, owners))

    def become(self, phase: int, world: World | None = None) -> World:
        return self.then(self.owner._replace(phase=phase), world)

    def records(
        self, what: str, record: Log, owner: Owner, world: World | None = None
    ) -> Iterator[Move]:
        """Adds a record, after which a start finds `record`."""
        if self.is_zombie:
            yield f"{what}: refused, another one has the log", self.become(GONE)
            return
        world = world or self.world
        logs = replaced(world.logs, self.log, record)
        yield what, self.then(owner, world._replace(logs=logs))

    def new_entry(self, born: int | None = None) -> World:
        number = self.world.last + 1
        entry = Entry(self.log, number, born or number)
        return self.world._replace(entry=entry, last=number)

    def is_same(self, entry: Entry | None, mutant: str) -> bool:
        """Whether the entry is of this log, and of the adapter that moves. While a move
        is open here, another adapter of the same name may have been created."""
        if not entry or entry.log != self.log:
            return False
        return entry.born == self.owner.born or self.mutant == mutant

    def moves(self) -> Iterator[Move]:
        for what, after in self.unnamed():
            yield f"{self.name}: {what}", after

    def unnamed(self) -> Iterator[Move]:
        phase, owner = self.owner.phase, self.owner
        if phase == EMPTY:
            yield from self.look()
            yield from self.claim()
        elif phase == CLAIMED:
            yield from self.create()
        elif phase == SERVES:
            yield from self.serve()
        elif phase <= LEFT:
            yield from self.leave()
        else:
            yield from self.arrive()
        if owner.clean:
            yield from self.clean()
        if owner.frees:
            yield from self.free()
        if phase in (EMPTY, SERVES) and not self.is_zombie:
            yield from self.tidy()

    def clean(self) -> Iterator[Move]:
        """Deletes the message of a move that has ended."""
        there = self.world.boxes[self.owner.box]
        done = self.owner._replace(clean=0, box=0)
        world = self.world
        if there and there.number == self.owner.clean:
            world = world._replace(boxes=replaced(world.boxes, self.owner.box, None))
        yield "deletes its message", self.then(done, world)

    def tidy(self) -> Iterator[Move]:
        """Deletes a message to this log that is too old for B to take it. An entry
        never gets its number again, so the look and the deletion may be one."""
        there, entry = self.world.boxes[self.log], self.world.entry
        if not there or (entry and entry.number == there.number):
            return
        if self.mutant == "keep-refused" and there.refused:
            return
        boxes = replaced(self.world.boxes, self.log, None)
        yield "deletes an old message", self.world._replace(boxes=boxes)

    def claim(self) -> Iterator[Move]:
        """Gives the log the name of an adapter that a client creates. A zombie does
        it, too, but makes no adapter then."""
        entry = self.world.entry
        if self.world.claims == self.bounds.claims or (entry and entry.log != self.log):
            return
        keeps = self.mutant != "reborn"
        world = self.new_entry(entry.born if entry and keeps else None)
        world = world._replace(claims=self.world.claims + 1)
        phase = EMPTY if self.is_zombie else CLAIMED
        yield "claims the name", self.become(phase, world)

    def create(self) -> Iterator[Move]:
        world = self.world
        steps = world.acknowledged + 1
        if not world.exists:
            world = world._replace(acknowledged=steps, exists=True)
        serves = self.owner._replace(phase=SERVES, steps=steps)
        what = "creates an adapter with the name"
        yield from self.records(what, Log(SERVES, steps=steps), serves, world)

    def free(self) -> Iterator[Move]:
        """Deletes the entry of an adapter that was deleted."""
        world, owner, entry = self.world, self.owner, self.world.entry
        done = owner._replace(frees=0)
        has_none = owner.phase == EMPTY or self.mutant == "free-arriving"
        if owner.frees > 0:
            if entry and entry.number == owner.frees:
                world = world._replace(entry=None)
            yield "frees the name", self.then(done, world)
        elif not has_none or not entry or entry.log != self.log:
            yield "has no name to free", self.then(done)
        else:
            yield (
                "reads the entry, to free the name",
                self.then(owner._replace(frees=entry.number)),
            )

    def serve(self) -> Iterator[Move]:
        world, owner = self.world, self.owner
        entry = world.entry
        yield from self.step(SERVES)
        if world.deletions < self.bounds.deletions:
            removed = Owner(EMPTY, clean=owner.clean, box=owner.box, frees=-1)
            deletions = world.deletions + 1
            after = world._replace(exists=False, deletions=deletions)
            yield from self.records("deletes the adapter", Log(), removed, after)
        if world.moves < self.bounds.moves and entry and not owner.clean:
            number = entry.number
            leaves = Owner(LEAVES, number, owner.steps, entry.born, frees=owner.frees)
            record = Log(GIVES_UP, number, owner.steps, entry.born)
            if self.mutant == "no-leaving":
                record = world.logs[self.log]
            after = world._replace(moves=world.moves + 1)
            what = f"holds the line, records `leaving` with number {number}"
            yield from self.records(what, record, leaves, after)

    def step(self, phase: int) -> Iterator[Move]:
        steps = self.owner.steps + 1
        if self.world.acknowledged > self.bounds.steps:
            return
        record = self.world.logs[self.log]._replace(steps=steps)
        owner = self.owner._replace(phase=phase, steps=steps)
        known = self.world._replace(acknowledged=self.world.acknowledged + 1)
        yield from self.records(f"acknowledges step {steps}", record, owner, known)

    def ended(self) -> Owner:
        """Returns the owner that deletes the message when the move has ended."""
        return Owner(clean=self.owner.number, box=1 - self.log, frees=self.owner.frees)

    def leave(self) -> Iterator[Move]:
        world, owner, phase = self.world, self.owner, self.owner.phase
        if phase == LEAVES:
            yield from self.ask()
        if phase in (LEAVES, ASKED):
            if self.mutant == "no-hold":
                yield from self.step(phase)
            if not self.is_same(world.entry, "any-stay"):
                yield "reads that the entry is not its log's", self.become(LEFT)
            yield "gives up", self.become(GIVES_UP)
        elif phase == GIVES_UP:
            yield from self.stay()
        elif phase == STAYS:
            serves = self.ended()._replace(phase=SERVES, steps=owner.steps)
            yield from self.records(
                "records `stayed`", Log(SERVES, 0, owner.steps), serves
            )
        elif phase == LEFT:
            yield from self.records("records `left`", Log(), self.ended())

    def ask(self) -> Iterator[Move]:
        world, owner, to = self.world, self.owner, 1 - self.log
        message = Message(owner.number, owner.steps, owner.born)
        if world.boxes[to] == message:
            yield "finds its message in the mailbox", self.become(ASKED)
        if world.boxes[to]:
            return
        after = world._replace(boxes=replaced(world.boxes, to, message))
        yield "puts a message into the mailbox", self.become(ASKED, after)
        yield "puts a message into the mailbox: the answer is lost", after

    def stay(self) -> Iterator[Move]:
        entry, number = self.world.entry, self.owner.number
        if self.mutant == "stay-blind":
            yield "believes that the adapter has stayed", self.become(STAYS)
        elif not entry or not self.is_same(entry, "any-stay"):
            yield "finds that the entry is not its log's", self.become(LEFT)
        elif entry.number != number or self.mutant == "no-rewrite":
            yield "finds that the entry is its log's", self.become(STAYS)
        else:
            after = self.new_entry(entry.born)
            yield "swaps the entry, to stay", self.become(STAYS, after)
            yield "swaps the entry, to stay: the answer is lost", after

    def look(self) -> Iterator[Move]:
        """Reads the mailbox, and the entry."""
        there, entry = self.world.boxes[self.log], self.world.entry
        if not there or there.refused:
            return
        if self.mutant != "no-look" and (not entry or entry.number != there.number):
            return
        refused = there._replace(refused=True)
        boxes = replaced(self.world.boxes, self.log, refused)
        yield "refuses the adapter", self.world._replace(boxes=boxes)
        if not self.is_zombie and not self.owner.clean:
            taken = Owner(TAKES, there.number, there.steps, there.born)
            taken = taken._replace(frees=self.owner.frees)
            yield "takes the message", self.then(taken)

    def arrive(self) -> Iterator[Move]:
        owner, phase = self.owner, self.owner.phase
        number, steps = owner.number, owner.steps
        done = Owner(clean=number, box=self.log, frees=owner.frees)
        if phase == TAKES and self.mutant == "early-swap":
            yield from self.swap(ARRIVES)
        elif phase == TAKES or (phase == ARRIVES and self.mutant == "early-swap"):
            arrives = owner._replace(phase=OWNS if phase == ARRIVES else ARRIVES)
            if self.mutant == "early-own":
                arrives = arrives._replace(phase=SERVES)
            record = Log(ARRIVES, number, steps, owner.born)
            yield from self.records("records `arriving`", record, arrives)
        elif phase == ARRIVES:
            yield from self.swap(OWNS)
            if self.mutant == "free-arriving":
                yield "has a name to free", self.then(owner._replace(frees=-1))
        elif phase == OWNS:
            serves = done._replace(phase=SERVES, steps=steps)
            yield from self.records("records `own`", Log(SERVES, 0, steps), serves)
        elif phase == DROPS:
            yield from self.records("records `dropped`", Log(), done)

    def swap(self, success: int) -> Iterator[Move]:
        """Swaps the entry for one of this log, and then is in the phase."""
        entry, number = self.world.entry, self.owner.number
        if (entry and entry.number == number) or self.mutant == "no-number":
            after = self.new_entry(self.owner.born)
            yield "swaps the entry", self.become(success, after)
            yield "swaps the entry: the answer is lost", after
        elif self.is_same(entry, "any-swap"):
            yield "finds that the entry is its log's", self.become(success)
        else:
            yield "finds that the entry is not its log's", self.become(DROPS)


def explore(model: Model, name: str) -> bool:
    """Returns whether the promise holds in every world that can be reached."""
    worlds = [model.first()]
    indices = {worlds[0]: 0}
    came = [0]  # From which world, first.
    # From which worlds by moves of owners that are no zombies: nobody may need one.
    led: list[list[int]] = [[]]
    moves = 0
    for at, world in enumerate(worlds):
        of_owners = list(model.moves(world))
        all_moves = of_owners + list(model.moves_of_zombies(world))
        moves += len(all_moves)
        for order, (_, after) in enumerate(all_moves):
            index = indices.setdefault(after, len(worlds))
            if index == len(worlds):
                worlds.append(after)
                came.append(at)
                led.append([])
                broken = problem(after)
                if broken:
                    return tell(model, worlds, came, f"{name}: broken: {broken}")
            if order < len(of_owners):
                led[index].append(at)
    dead = dead_end(worlds, led)
    if dead is not None:
        what = f"{name}: broken: the adapter is nowhere, or a mailbox is blocked"
        return tell(model, worlds[: dead + 1], came, what)
    print(f"{name}: holds in all {len(worlds)} states and {moves} moves")
    return True


def dead_end(worlds: list[World], led: list[list[int]]) -> int | None:
    """Returns the first world from which none leads to one that is settled."""
    front = {at for at, world in enumerate(worlds) if is_settled(world)}
    settled = set(front)
    while front:
        front = {before for at in front for before in led[at]} - settled
        settled |= front
    return next((at for at in range(len(worlds)) if at not in settled), None)


def tell(model: Model, worlds: list[World], came: list[int], what: str) -> bool:
    """Prints the schedule that leads to the last world."""
    path = [len(worlds) - 1]
    while path[-1]:
        path.append(came[path[-1]])
    path.reverse()
    print(f"{what}: {len(path) - 1} steps, found among {len(came)} states")
    for number, (before, after) in enumerate(pairwise(path), 1):
        world = worlds[before]
        moves = chain(model.moves(world), model.moves_of_zombies(world))
        print(f"  {number:2}", next(name for name, to in moves if to == worlds[after]))
    return False


if __name__ == "__main__":
    sys.exit(run(__doc__, MUTANTS, Bounds, Model, explore))
