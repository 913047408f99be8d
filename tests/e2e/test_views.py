"""Tests what an operator sees while a killed server comes back: the console and
weftctl's views say at every moment what is restored, and none of them blocks."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import daemon as daemon_module
import pytest
from durable import Durable, train

import weft

WEFTCTL = daemon_module.BUILD_DIR / "client" / "weftctl" / "weftctl"
ADAPTERS = 100
SLOW_REPLAY = "recovery.replay=sleep(10)"  # For each record.
LONGEST = 1.0


def timed(view: Callable[[], Any]) -> Any:
    start = time.monotonic()
    shown = view()
    assert time.monotonic() - start <= LONGEST, view
    return shown


def weftctl(address: str, *words: str) -> tuple[int, str]:
    command = [str(WEFTCTL), *words, "--server", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


class Views:
    """The views of one server, each checked against the others."""

    def __init__(self, server: str, console: str) -> None:
        self.server = server
        self.console = console
        self.left = set[str]()  # What the last view said is not restored.

    def state(self) -> Any:
        url = f"http://{self.console}/console/v1/state"
        with urllib.request.urlopen(url, timeout=LONGEST) as reply:
            return json.load(reply)

    def check(self) -> bool:
        """Looks at each view once. Returns whether all adapters are restored."""
        state = timed(self.state)
        if "adapters" not in state:
            assert state["server"]["phase"] == "loading"
            return False
        assert state["num_adapters"] == ADAPTERS
        left = {a["id"] for a in state["adapters"] if a["restoring"]}
        assert len(left) == state["num_restoring"]
        code, info = timed(lambda: weftctl(self.server, "info"))
        assert code == 0, info
        said = re.search(
            r"^state +(serving|restoring (\d+) of 100 adapters)", info, re.M
        )
        assert said is not None, info
        assert int(said[2] or 0) <= len(left)
        code, table = timed(lambda: weftctl(self.server, "adapters", "list"))
        assert code == 0, table
        rows = [line.split()[:3] for line in table.splitlines()[1:]]
        assert len(rows) == ADAPTERS
        listed = {name for name, _, what in rows if what == "restoring"}
        # Restored adapters stay restored, in whichever view.
        assert listed <= left and (not self.left or left <= self.left)
        self.left = listed
        return not left


def load(daemon: Any, names: list[str], stop: threading.Event) -> None:
    with daemon.client(retry=weft.NO_RETRY) as client:
        seed = 0
        while not stop.is_set():
            for name in names:
                try:
                    train(client, name, seed)
                except weft.WeftError:
                    return
            seed += 1


def test_every_view_says_what_a_kill_has_left_to_restore(
    durable: Durable, tmp_path: Path
) -> None:
    port = daemon_module.free_port()
    console = f"127.0.0.1:{port}"
    daemon = durable.start(
        "--console-listen", console, "--max-resident-adapters", str(ADAPTERS)
    )
    names = [f"a{i:03d}" for i in range(ADAPTERS)]
    with daemon.client() as client:
        for i, name in enumerate(names):
            client.create_adapter(name, rank=2, seed=i)
    stop = threading.Event()
    threads = [
        threading.Thread(target=load, args=(daemon, names[i::4], stop))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    time.sleep(1)
    views = Views(daemon.address, console)
    assert views.check()
    daemon.kill()
    stop.set()
    for thread in threads:
        thread.join()
    code, gone = timed(lambda: weftctl(daemon.address, "info"))
    assert code == 1 and "UNAVAILABLE" in gone
    with pytest.raises(OSError):
        timed(views.state)

    daemon = durable.launch(failpoints=SLOW_REPLAY)
    daemon.wait_until_serving()
    views.server = daemon.address
    looks = 0
    while not views.check():
        looks += 1
        if looks >= 3:
            time.sleep(0.2)
    assert looks >= 3, "the adapters were restored before anybody looked"
    with daemon.client() as client:
        adapters = client.adapters()
    assert len(adapters) == ADAPTERS and not any(a.restoring for a in adapters)
