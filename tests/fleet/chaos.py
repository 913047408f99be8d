"""Kills and freezes daemons with one state, and restarts them as a supervisor does."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable

import daemon as daemon_module
from door import Door
from members import Fleet, Member

FENCED = 4  # The exit status of a daemon that has lost its state.
# A take-over takes a start of the other daemon, its patience and a replay.
SERVICE_SECONDS = 60.0


class Chaos:
    """More daemons than the state has logs (by default one), so that each log has one
    that serves most of the time. The door leads to the owner of log 0."""

    def __init__(
        self,
        fleet: Fleet,
        logs: int,
        door: Door,
        seed: int,
        *flags: str,
        daemons: int = 0,
    ) -> None:
        self._random = random.Random(seed)
        self._door = door
        self._logs = logs
        self._frozen: Member | None = None
        self._down: Member | None = None  # Not to be restarted now.
        self._fronts: dict[str, str] = {}
        self.events: Counter[str] = Counter()
        self.longest = 0.0  # Seconds in which a log had no daemon that serves.
        for name in "abcdefgh"[: daemons or logs + 1]:
            front = f"127.0.0.1:{daemon_module.free_port()}"
            self._fronts[name] = front
            own = ("--logs", str(logs), "--tinker-listen", front)
            fleet.add(name, *own, *flags)
        self.members = fleet.members

    @property
    def addresses(self) -> str:
        return ",".join(member.listen for member in self.members)

    def owners(self) -> list[Member]:
        """Restarts what has ended, and returns the daemons that serve."""
        serving = []
        for member in self.members:
            if member in (self._frozen, self._down):
                continue
            code = member.exit_code()
            if code is not None:
                assert code == FENCED, f"{code}: {member.log_tail()}"
                self.events["fenced"] += 1
                member.launch()
            elif member.serves():
                serving.append(member)
                if member.served_log() == 0:
                    self._door.point(self._fronts[member.name])
        return serving

    def wait_for_service(self) -> list[Member]:
        """Waits until each log has an owner, and returns the owners."""
        begin = time.monotonic()
        while len(owners := self.owners()) < self._logs:
            if time.monotonic() - begin > SERVICE_SECONDS:
                tails = [member.log_tail(20) for member in self.members]
                raise AssertionError("a log has no server:\n" + "\n\n".join(tails))
            time.sleep(0.05)
        self.longest = max(self.longest, time.monotonic() - begin)
        return owners

    def run(
        self,
        kills: int,
        zombies: int,
        steps: Callable[[], int],
        report: Callable[[str], None],
    ) -> None:
        """Strikes as often, mostly after some more of the clients' `steps`, sometimes
        while no daemon serves yet."""
        strikes = [self.kill] * kills + [self.freeze] * zombies
        self._random.shuffle(strikes)
        for strike in strikes:
            if self._random.random() < 0.8:
                self._wait_for_steps(steps)
            time.sleep(self._random.uniform(0.0, 0.5))
            report(strike())
        self._wait_for_steps(steps)

    def _wait_for_steps(self, steps: Callable[[], int]) -> None:
        self.wait_for_service()
        before = steps()
        self.wait_until(lambda: steps() != before)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Waits for what clients do, and restarts daemons meanwhile."""
        limit = time.monotonic() + SERVICE_SECONDS
        while not holds():
            assert time.monotonic() < limit, "the clients do not go on"
            self.owners()
            time.sleep(0.02)

    def kill(self) -> str:
        """Kills a daemon, which restarts at once, or when the others serve all logs."""
        owners = self.owners()
        standbys = [member for member in self.members if member not in owners]
        chance = self._random.random()
        victim = self._random.choice(
            standbys if standbys and (chance < 0.25 or not owners) else owners
        )
        victim.kill()
        self.events["kills"] += 1
        if chance > 0.9:
            self._down = victim
            self.wait_for_service()
            self._down = None
        victim.launch()
        what = "owner" if victim in owners else "standby"
        return f"killed {what} {victim.name}" + (", machine" if chance > 0.9 else "")

    def freeze(self) -> str:
        """Freezes an owner until another daemon has served its log for a moment."""
        owner = self._random.choice(self.wait_for_service())
        self._frozen = owner
        owner.freeze()
        self.wait_for_service()
        time.sleep(self._random.uniform(0.0, 1.0))
        owner.thaw()
        code = owner.wait()
        assert code == FENCED, f"the zombie {owner.name} ended with {code}"
        self._frozen = None
        owner.launch()
        self.events["zombies"] += 1
        return f"froze owner {owner.name}"
