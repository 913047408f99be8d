"""Tests that only times which are shown or stored come from the wall clock. Durations,
deadlines and intervals come from SteadyNow (src/base/clock.h), because an operator or
NTP may set the wall clock."""

import re
from pathlib import Path

from sources import ROOT

# What each file reads the wall clock for.
WALL = {
    "client/weftctl/server_commands.cc": "the name of a checkpoint",
    "client/weftctl/token_commands.cc": "expiry of tokens",
    "src/engine/adapters/adapter_manager.cc": "when an adapter was made",
    "src/engine/adapters/adapter_table.h": "when an adapter was made",
    "src/engine/adapters/adapter_io.cc": "when a checkpoint was made, and expires",
    "src/base/clock.h": "the start of SteadyNow",
    "src/base/observe/log.cc": "the time of a log line",
    "src/dispatch/adapter_desk.cc": "when an adapter was used",
    "src/dispatch/state.cc": "when an adapter was used",
    "src/engine/samplers/samplers.cc": "expiry of checkpoints",
    "src/log/bucket/state_bucket.cc": "the first epoch of a copy",
    "src/log/folder/state_images.cc": "the names of images",
    "src/store/credentials.cc": "how long credentials last",
    "src/engine/device/engine_probe.cc": "a metric that alerts compare with the time",
    "server/call/authenticator.cc": "expiry of tokens",
    "server/call/call.cc": "when a call failed, for the console",
    "server/console/state.cc": "the console's time",
    "server/wire/sample_validation.cc": "a seed, if the system draws none",
    "server/call/load_history.cc": "the console's time",
    "server/call/metric_values.cc": "the age of the process, by the time of its start",
    "server/tinker/accounts.cc": "when something was used or done",
    "server/tinker/credentials.cc": "expiry of JWTs",
    "server/tinker/routes.cc": "expiry of JWTs",
    "server/tinker/sessions.cc": "when a session was made",
    "server/tinker/front.cc": "what was used or done long ago",
    "server/tinker/transfers.cc": "expiry of URLs",
}
_WALL_CLOCK = re.compile(
    r"absl::Now\(\)|GetCurrentTimeNanos|CLOCK_REALTIME|system_clock::now"
)


def readers(root: Path) -> set[str]:
    """Returns the sources that read the wall clock."""
    return {
        str(path.relative_to(root))
        for folder in ("src", "server", "client")
        for path in (root / folder).rglob("*")
        if path.suffix in (".cc", ".h") and _WALL_CLOCK.search(path.read_text())
    }


def test_only_shown_and_stored_times_come_from_the_wall_clock() -> None:
    assert readers(ROOT) == set(WALL)
