"""Sessions of the Tinker API move whole from one log to another, while an unmodified
SDK trains by an edge whose daemon has neither."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import stores
import tinker_sdk
from daemon import wait_until
from door import Door
from doors import Doors, Site
from members import Fleet, run_weftctl
from sdk_process import SdkClient
from stores import Store
from test_chaos import calm_ends, ends
from trainers import FLAGS, RETRY

import weft

pytestmark = [
    pytest.mark.skipif(
        not stores.is_installed(),
        reason="no build/store-venv: object stores were NOT tested",
    ),
    pytest.mark.skipif(
        not tinker_sdk.SDK.exists(),
        reason="no Tinker SDK: deploy/setup.sh --tests installs it",
    ),
]

MOVES = 4


@pytest.fixture
def doors(fleet: Fleet) -> Iterator[Doors]:
    with Doors(fleet, logs=3, flags=FLAGS) as made:
        yield made


def sessions(doors: Doors, site: Site) -> list[str]:
    """Returns the sessions that the site's daemon has."""
    headers = {"X-API-Key": f"tml-{doors.alice}"}
    reply = httpx.get(
        f"{site.url}/api/v1/sessions", headers=headers, verify=doors.context()
    )
    assert reply.status_code == 200, reply.text
    found: list[str] = reply.json()["sessions"]
    return found


def wait_for_rounds(sdk: SdkClient, more: int = 2) -> None:
    before = sdk.rounds

    def has_more() -> bool:
        sdk.expect_running()
        return sdk.rounds >= before + more

    wait_until(has_more)


def begin(doors: Doors, door: Door, site: Site, folder: Path) -> tuple[SdkClient, str]:
    """Starts the SDK with a session of this site's daemon. Returns its id."""
    door.point(site.address)
    url = door.url.replace("http://127.0.0.1", "https://localhost")
    sdk = SdkClient(url, folder, more=doors.environment())
    wait_until(lambda: sdk.rounds > 1)
    (session,) = sessions(doors, site)
    return sdk, session


def admin(doors: Doors, site: Site) -> Any:
    return doors.client(site, doors.root, timeout=60.0, retry=RETRY)


def check_saved(doors: Doors, site: Site, sdk: SdkClient, folder: Path) -> None:
    """Expects what the same requests make of a daemon that nothing disturbs."""
    with doors.client(site, doors.alice) as client:
        found = ends([], client, folder / "ends")
    calm = calm_ends(folder / "calm", [], sdk)
    assert sorted(found) == sorted(calm) and found
    assert [name for name in calm if found[name] != calm[name]] == []


def test_the_sdk_trains_while_its_session_moves(doors: Doors, tmp_path: Path) -> None:
    a, b, c = (doors.add(name) for name in "abc")
    d = doors.add("d", "standby")
    pauses = []
    with Door() as door:
        sdk, session = begin(doors, door, b, tmp_path / "sdk")
        try:
            door.point(c.address)
            wait_for_rounds(sdk)
            log = 1
            with admin(doors, c) as client:
                for _ in range(MOVES):
                    log = 1 - log
                    start = time.monotonic()
                    client.move_adapter(session, log)
                    wait_for_rounds(sdk, 1)
                    pauses.append(time.monotonic() - start)
                    # With a sampling session of its own in each tenth round.
                    wait_for_rounds(sdk, 6)
                assert log == 1
                client.move_adapter(f"{session}.train.0", 0)
            wait_until(lambda: sessions(doors, a) == [session])
            assert sessions(doors, b) == []
            a.member.kill()
            start = time.monotonic()
            wait_for_rounds(sdk, 3)
            taken_over = time.monotonic() - start
            assert d.member.served_log() == 0
            sdk.stop()
        finally:
            sdk.kill()
    check_saved(doors, d, sdk, tmp_path)
    print(
        f"{sdk.rounds} rounds; a round during a move took {min(pauses):.1f} to"
        f" {max(pauses):.1f} s; after the kill the SDK went on in {taken_over:.1f} s"
    )


def test_sessions_leave_a_daemon_that_drains(
    doors: Doors, seaweedfs: Store, tmp_path: Path
) -> None:
    a, b, c = (doors.add(name) for name in "abc")
    with Door() as door:
        sdk, session = begin(doors, door, b, tmp_path / "sdk")
        try:
            door.point(c.address)
            wait_for_rounds(sdk)
            drain = ("fleet", "drain", "--server", b.member.address)
            drained = run_weftctl(seaweedfs, *drain, token=doors.root)
            assert drained.returncode == 0, drained.stderr
            assert b.member.wait() == 0, b.member.log_tail()
            wait_until(lambda: [*sessions(doors, a), *sessions(doors, c)] == [session])
            wait_for_rounds(sdk, 3)
            sdk.stop()
        finally:
            sdk.kill()
    check_saved(doors, c, sdk, tmp_path)


def test_a_receiver_without_room_refuses_the_session(
    doors: Doors, tmp_path: Path
) -> None:
    doors.flags = (*FLAGS, "--max-adapters", "1")
    a, b = (doors.add(name) for name in "ab")
    with doors.client(a, doors.alice) as client:
        client.create_adapter("x", rank=2)
    with Door() as door:
        sdk, session = begin(doors, door, b, tmp_path / "sdk")
        try:
            with (
                admin(doors, b) as client,
                pytest.raises(weft.FailedPrecondition, match="max-adapters"),
            ):
                client.move_adapter(session, 0)
            wait_for_rounds(sdk)
            assert sessions(doors, b) == [session]
            sdk.stop()
        finally:
            sdk.kill()
