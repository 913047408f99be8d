"""Runs the unmodified Tinker SDK while the daemon is killed and started again."""

from __future__ import annotations

from tinker_daemon import TinkerDaemon


def test_training_goes_on_after_the_server_is_killed(server: TinkerDaemon) -> None:
    calm = server.run("calm")
    server.begin("survive")
    for _ in range(3):
        assert server.next_line() == "kill"
        server.server.kill()
        server.server.start()
    assert server.result() == calm
