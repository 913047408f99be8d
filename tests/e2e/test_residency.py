"""Tests that clients see no difference if adapters outnumber the device slots."""

from __future__ import annotations

import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import daemon as daemon_module
import exported
from models import tiny_model
from texts import next_token, random_tokens

VOCAB = 320
CLIENTS = 12
SLOTS = 3
ROUNDS = 4
# Every sequence runs alone, so that results do not depend on other sequences
# in the batch.
ALONE = ("--max-batch-tokens", "1", "--max-decode-sequences", "1")


def test_clients_at_once_get_the_bits_of_clients_in_turn(tmp_path: Path) -> None:
    model = tiny_model("llama-tied")
    with daemon_module.running(model, tmp_path / "all", *ALONE) as daemon:
        expected = [_use(daemon, tenant, None) for tenant in range(CLIENTS)]
        assert _series(daemon, "weft_adapter_moves_total") == 0
    # With -1, the adapters that leave a GPU wait on disk. By default they would wait in
    # host memory if there is room.
    flags = (
        "--max-resident-adapters",
        str(SLOTS),
        "--adapter-host-bytes",
        "-1",
        *ALONE,
    )
    with daemon_module.running(model, tmp_path / "few", *flags) as daemon:
        barrier = threading.Barrier(CLIENTS)
        with ThreadPoolExecutor(CLIENTS) as pool:
            futures = [
                pool.submit(_use, daemon, tenant, barrier) for tenant in range(CLIENTS)
            ]
            actual = [future.result(240) for future in futures]
        with daemon.client() as client:
            infos = client.adapters()
        assert len(infos) == CLIENTS
        places = Counter(info.location for info in infos)
        assert places == {"device": SLOTS, "disk": CLIENTS - SLOTS}
        for info in infos:
            assert (info.resident_bytes > 0) == (info.location == "device")
        _check_metrics(daemon)
        assert daemon.stop() == 0
        assert list((tmp_path / "few").rglob(".spill/*")) == []
    for tenant in range(CLIENTS):
        assert actual[tenant] == expected[tenant], f"client {tenant}"


def test_samples_in_flight_outlive_moves_and_the_adapter(tmp_path: Path) -> None:
    flags = ("--max-resident-adapters", "1")
    model = tiny_model("llama-tied")
    options: dict[str, Any] = {"max_tokens": 500, "ignore_eos": True, "in_flight": True}
    with (
        daemon_module.running(model, tmp_path, *flags) as daemon,
        daemon.client() as client,
    ):
        both = [client.create_adapter(name, rank=4) for name in ("other", "moving")]
        batch = [next_token(random_tokens(VOCAB, 20, 1))]
        versions: list[int] = []
        for delta in both[1].sample_stream([5, 6, 7], seed=1, **options):
            versions += delta.versions
            for adapter in both:
                adapter.forward_backward(batch)
                adapter.optim_step(learning_rate=1e-3)
        assert len(versions) == 500 and versions == sorted(versions)
        assert len(set(versions)) >= 3
        assert _series(daemon, "weft_adapter_moves_total") >= 4
        stream = both[1].sample_stream([5, 6, 7], seed=2, **options)
        versions = next(stream).versions
        both[1].delete()
        versions += [version for delta in stream for version in delta.versions]
        assert len(versions) == 500 and len(set(versions)) == 1


def _use(daemon: Any, tenant: int, barrier: threading.Barrier | None) -> list[Any]:
    """Returns all that one client sees of its own adapter, over its own connection."""
    seen: list[Any] = []
    with daemon.client() as client:
        adapter = client.create_adapter(f"a{tenant}", rank=4 + tenant % 3, seed=tenant)
        for step in range(ROUNDS):
            if barrier is not None:
                barrier.wait(120)
            seed = 100 * tenant + step
            batch = [
                next_token(random_tokens(VOCAB, 9 + tenant, seed + i)) for i in (0, 50)
            ]
            trained = adapter.forward_backward(batch)
            seen.append(trained.results[0].logprobs.tobytes())
            seen.append(adapter.optim_step(learning_rate=1e-2).grad_norm)
            if step == 1:
                adapter.snapshot("s")
            seen.append(_sampled(adapter, None))
            if step >= 1:
                seen.append(_sampled(adapter, "s"))
        adapter.forward_backward([next_token(random_tokens(VOCAB, 7, tenant))])
        seen.append(exported.saved(daemon, adapter, "last"))
    return seen


def _sampled(adapter: Any, snapshot: str | None) -> tuple[list[int], list[float], int]:
    result = adapter.sample(
        [5, 6, 7], snapshot=snapshot, max_tokens=6, seed=3, ignore_eos=True
    )
    sample = result.samples[0]
    return list(sample.tokens), list(sample.logprobs), result.version


def _check_metrics(daemon: Any) -> None:
    assert _series(daemon, "weft_adapters", 'location="device"') == SLOTS
    assert _series(daemon, "weft_adapters", 'location="disk"') == CLIENTS - SLOTS
    ways_in = 'direction="disk_to_device"'
    ways_out = 'direction="device_to_disk"'
    moves_in = _series(daemon, "weft_adapter_moves_total", ways_in)
    moves_out = _series(daemon, "weft_adapter_moves_total", ways_out)
    assert moves_in > 0
    assert moves_out - moves_in == CLIENTS - SLOTS
    for way in (ways_in, ways_out):
        assert _series(daemon, "weft_adapter_moved_bytes_total", way) > 0
    assert _series(daemon, "weft_adapter_swap_in_seconds_count") == moves_in
    assert _series(daemon, "weft_adapter_move_failures_total") == 0


def _series(daemon: Any, name: str, label: str = "") -> float:
    """Returns the sum over the series with this name and label."""
    found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", daemon.scrape(), re.MULTILINE)
    assert found, name
    return sum(float(value) for labels, value in found if label in labels)
