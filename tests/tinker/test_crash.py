"""Tests what a client of the Tinker API gets if the server dies between the promise of
a step and its result, and what a step costs the disk."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from raw_client import TOKENS, RawClient
from tinker_daemon import BUILD_DIR, WEFTCTL, TinkerDaemon

FAILPOINTS = BUILD_DIR / "tests" / "support" / "libweft_failpoints.so"
# The groups of records that a run of `Rounds` writes, and some more.
MOST_WRITES = 12


class Mortal:
    """A server that is started again whenever it has died."""

    def __init__(self, folder: Path) -> None:
        self.tinker = TinkerDaemon(folder)
        self.client = RawClient(self.tinker)
        self.deaths = 0

    def restart(self, failpoints: str) -> None:
        self.tinker.server.kill()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(FAILPOINTS))
            patch.setenv("WEFT_FAILPOINTS", failpoints)
            self.tinker.server.launch()
        try:
            self.tinker.server.wait_until_serving()
        except Exception:
            self.revive()

    def revive(self) -> None:
        self.tinker.server.wait()
        self.deaths += 1
        self.tinker.server.start()

    def again(self, call: Any, *args: Any) -> Any:
        """Makes the call until the server lives long enough to answer."""
        while True:
            try:
                return call(*args)
            except OSError:
                self.revive()


def norms_of(mortal: Mortal, model: str, seq: int) -> tuple[float, float]:
    """Promises four steps, and then asks for their results."""
    client = mortal.client
    promises = [
        mortal.again(client.train if s % 2 else client.step, model, s)
        for s in range(seq, seq + 4)
    ]
    results = [mortal.again(client.result, promise) for promise in promises]
    norms = [result["metrics"].get("grad_norm") for result in results]
    return norms[1], norms[3]


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Mortal]:
    server = Mortal(tmp_path)
    yield server
    server.tinker.stop()


def test_each_step_has_one_result_wherever_the_server_dies(mortal: Mortal) -> None:
    """Both models take the same steps. The server dies only under the second one."""
    client = mortal.client
    calm, struck = (client.model(client.session()) for _ in range(2))
    for write in range(1, MOST_WRITES + 1):
        seq = 4 * write - 3
        expected = norms_of(mortal, calm, seq)
        # The process ends before its Nth write to the log, or after its Nth sync.
        point = "journal.sync" if write % 2 else "files.write"
        mortal.restart(f"{point}=kill#{write}")
        assert norms_of(mortal, struck, seq) == expected
    assert mortal.deaths >= MOST_WRITES // 2


@pytest.mark.parametrize("end", ["kill", "snapshot", "stop"])
def test_a_step_behind_a_gap_waits_in_the_next_process(
    mortal: Mortal, end: str
) -> None:
    """The steps that come before it come to the next process. What fails comes back,
    too."""
    client, server = mortal.client, mortal.tinker.server
    calm, struck = (client.model(client.session()) for _ in range(2))
    expected = norms_of(mortal, calm, 1)
    fails = client.train(struck, 3, loss="none")
    behind = [client.train(struck, 5), client.step(struck, 6)]
    if end == "snapshot":
        command = [str(WEFTCTL), "state", "snapshot", "--server", server.address]
        subprocess.run(command, check=True)
    (server.stop if end == "stop" else server.kill)()
    server.start()
    first = [client.train(struck, 1), client.step(struck, 2)]
    assert client.norm(first[1]) == expected[0]
    assert client.result(fails)["category"] == "user"
    client.save(struck, 4, "between")
    assert client.norm(behind[1]) == expected[1]
    # The result stays, and a repeated request gets it.
    assert client.norm(client.step(struck, 6)) == expected[1]


def syncs(server: TinkerDaemon) -> int:
    page = server.server.scrape()
    found = re.search(r"^weft_journal_sync_seconds_count (\d+)", page, re.MULTILINE)
    assert found is not None, page
    return int(found[1])


def trained(client: RawClient, steps: int) -> None:
    """Makes a model, and runs steps one at a time."""
    model = client.model(client.session())
    for seq in range(1, steps + 1):
        client.result(client.train(model, seq))


def test_steps_share_the_syncs_of_the_log(mortal: Mortal) -> None:
    """A step alone has a sync for its promise, and one for its end. The syncs of steps
    that run together are shared, so that a step needs at most one. The disk is slow, so
    that clients come together while it syncs."""
    steps, clients = 20, 8
    mortal.restart("journal.sync=sleep(20)")
    before = syncs(mortal.tinker)
    trained(mortal.client, steps)
    alone = syncs(mortal.tinker) - before
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda _: trained(mortal.client, steps), range(clients)))
    together = syncs(mortal.tinker) - before - alone
    # A model costs four at most: for its session, for itself and the request that makes
    # it, and for the adapter.
    assert alone <= 2 * steps + 4
    assert together <= clients * (steps + 4)


def end_while_it_runs(tinker: TinkerDaemon) -> None:
    """Kills the server in a micro-batch, as the system does if memory runs out."""
    running = tinker.state / "RUNNING"
    limit = time.monotonic() + 60
    # The file's last number counts the steps that run.
    while int.from_bytes(running.read_bytes()[-8:], sys.byteorder) == 0:
        assert time.monotonic() < limit, "the step never runs"
    tinker.server.kill()


def test_a_step_that_ends_the_server_three_times_is_set_aside(tmp_path: Path) -> None:
    with TinkerDaemon(tmp_path) as tinker:
        client = RawClient(tinker)
        models = [client.model(client.session()) for _ in range(2)]
        long = [[first, *TOKENS * 30] for first in range(3, 203)]
        fatal = client.train(models[0], 1, data=long * 5)
        step = client.step(models[0], 2)
        other = client.train(models[1], 1)
        for _ in range(3):
            end_while_it_runs(tinker)
            tinker.server.start()
        failure = client.result(fatal)
        assert "it does not run again" in failure["error"], failure
        assert failure["category"] == "user"
        # What did not end the server is done, in the batches of both adapters.
        assert "metrics" in client.result(other)
        assert client.norm(step) == 0
        assert client.norm(client.step(models[1], 2)) > 0
        assert "weft_steps_set_aside_total 1\n" in tinker.server.scrape()
        assert "a step that ended the process is set aside" in tinker.server.log_tail()
        tinker.server.kill()
        tinker.server.start()
        assert client.result(fatal) == failure
