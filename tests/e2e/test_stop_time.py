"""Tests how long an idle daemon takes to end. Nothing else runs meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

import daemon as daemon_module
from models import tiny_model
from texts import next_token, random_tokens

VOCAB = 320
STOP_SECONDS = 0.8


def test_an_idle_daemon_ends_at_once(tmp_path: Path) -> None:
    """On an idle machine this takes 0.3 s, even with a client and a scraper."""
    seconds = []
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        daemon = daemon_module.Daemon(tiny_model("llama-tied"), folder)
        daemon.start()
        try:
            with daemon.client() as client:
                client.create_adapter("idle", rank=4).forward_backward(
                    [next_token(random_tokens(VOCAB, 10, 1))]
                )
                daemon.scrape()
                time.sleep(0.2)
                start = time.monotonic()
                assert daemon.stop() == 0, daemon.log_tail()
                seconds.append(time.monotonic() - start)
        finally:
            daemon.kill()
    assert min(seconds) < STOP_SECONDS, seconds
