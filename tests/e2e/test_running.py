"""Tests draining, metrics, admission, connections and losses computed by the
client."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

import checkpoints
import daemon as daemon_module
import grpc
import metrics_table
import numpy as np
import pytest
import tolerance
from models import tiny_model
from raw import Raw, datum
from texts import next_token, random_tokens

VOCAB = 320
# About a second of work for a tiny model on one core.
LONG = [datum(random_tokens(VOCAB, 500, seed)) for seed in range(32)]
SHORT = [datum(random_tokens(VOCAB, 10, 1))]


def test_sigterm_finishes_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    with daemon_module.Daemon(tiny_model("llama-tied"), tmp_path / "weftd") as daemon:
        with Raw(daemon.address) as raw, ThreadPoolExecutor(2) as pool:
            assert raw.create("busy", rank=4).code == "OK"
            running = [
                pool.submit(raw.forward_backward, "busy", LONG, step=step)
                for step in (1, 2)
            ]
            daemon.wait_for_calls("ForwardBackward", 2)
            assert not running[1].done(), "LONG is too short for this machine"
            daemon.terminate()
            daemon.wait_for_drain()
            refused = raw.forward("", SHORT)
            assert refused.code == "UNAVAILABLE", refused
            assert [future.result(60).code for future in running] == ["OK", "OK"]
        assert daemon.wait() == 0, daemon.log_tail()


def test_drain_answers_when_the_queue_is_empty(tmp_path: Path) -> None:
    import weft

    with daemon_module.Daemon(tiny_model("llama-tied"), tmp_path / "weftd") as daemon:
        with Raw(daemon.address) as raw, ThreadPoolExecutor(1) as pool:
            assert raw.create("busy", rank=4).code == "OK"
            running = pool.submit(raw.forward_backward, "busy", LONG)
            daemon.wait_for_calls("ForwardBackward", 1)
            with daemon.client() as client:
                client.drain()
                answered = r'grpc_code="OK",grpc_method="ForwardBackward".*\} 1'
                assert re.search(answered, daemon.scrape())
                assert running.result(60).code == "OK"
                assert not client.healthy()
                assert client.info().draining
            assert raw.forward("", SHORT).code == "UNAVAILABLE"
        assert weft.Unavailable.code == "UNAVAILABLE"
        assert daemon.stop() == 0


def test_a_cancelled_request_leaves_nothing_behind(
    daemon_for: Any, unique: Any
) -> None:
    name = unique("cancelled")
    with Raw(daemon_for("llama-tied").address) as raw:
        assert raw.create(name, rank=4).code == "OK"
        outcome = raw.forward_backward(name, LONG, step=1, timeout=0.05)
        assert outcome.code == "DEADLINE_EXCEEDED"
        # Whether or not the step ran, its number can be sent again with the same
        # request.
        assert raw.forward_backward(name, LONG, step=1).code == "OK"
        assert raw.optim_step(name, step=2).code == "OK"


def test_full_slots_are_told_with_a_code(tmp_path: Path) -> None:
    flags = ("--max-adapters", "2")
    folder = tmp_path / "weftd"
    with (
        daemon_module.running(tiny_model("llama-tied"), folder, *flags) as daemon,
        Raw(daemon.address) as raw,
    ):
        assert raw.create("a", rank=4).code == "OK"
        assert raw.create("b", rank=4).code == "OK"
        refused = raw.create("c", rank=4)
        assert refused.code == "RESOURCE_EXHAUSTED", refused
        assert "2" in refused.message
        with daemon.client() as client:
            client.delete_adapter("a")
        assert raw.create("c", rank=4).code == "OK"


def test_a_share_in_use_is_told_with_a_code(tmp_path: Path) -> None:
    flags = ("--request-memory", "4MiB")
    folder = tmp_path / "weftd"
    with (
        daemon_module.running(tiny_model("llama-tied"), folder, *flags) as daemon,
        Raw(daemon.address) as raw,
        ThreadPoolExecutor(8) as pool,
    ):
        outcomes = list(pool.map(lambda _: raw.forward("", LONG), range(8)))
        codes = [outcome.code for outcome in outcomes]
        assert set(codes) == {"OK", "RESOURCE_EXHAUSTED"}
        refused = outcomes[codes.index("RESOURCE_EXHAUSTED")]
        assert int(refused.trailers["grpc-retry-pushback-ms"]) > 0
        assert raw.forward("", SHORT).code == "OK"


def test_a_second_daemon_on_the_port_does_not_start(
    daemon_for: Any, tmp_path: Path
) -> None:
    address = daemon_for("llama-tied").address
    second = daemon_module.Daemon(
        tiny_model("llama-tied"), tmp_path / "weftd", "--listen", address
    )
    second.launch()
    assert 0 < second.wait() < 128
    assert address in second.log_tail()


def test_clients_of_one_process_have_connections_of_their_own(daemon_for: Any) -> None:
    import weft

    daemon = daemon_for("llama-tied")
    before = _sockets(daemon.pid)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(daemon.client()).info()
        assert len(_sockets(daemon.pid) - before) == 3

    async def with_asyncio() -> set[str]:
        async with AsyncExitStack() as stack:
            for _ in range(3):
                client = weft.AsyncClient(daemon.address, timeout=60.0)
                await (await stack.enter_async_context(client)).info()
            return _sockets(daemon.pid)

    before = _sockets(daemon.pid)
    assert len(asyncio.run(with_asyncio()) - before) == 3


def _sockets(pid: int) -> set[str]:
    """Returns the open sockets of a process, by inode."""
    links = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # The file was closed after it was listed.
            links.add(os.readlink(descriptor))
    return {link for link in links if link.startswith("socket:")}


def test_metrics_are_well_formed_and_move(daemon_for: Any, unique: Any) -> None:
    daemon = daemon_for("llama-tied")
    before = _values(daemon.scrape())
    with daemon.client() as client:
        adapter = client.create_adapter(unique("counted"), rank=4)
        adapter.forward_backward([next_token(random_tokens(VOCAB, 41, 1))])
        adapter.optim_step()
        client.sample([5, 6, 7], num_samples=2, max_tokens=9, ignore_eos=True)
    page = daemon.scrape()
    after = _values(page)
    assert _moved(before, after, "weft_train_tokens_total") == 40
    assert _moved(before, after, "weft_sampled_tokens_total") == 18
    handled = "grpc_server_handled_total"
    assert _moved(before, after, handled) >= 4
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=page, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_of_metrics_has_what_the_server_exports(tmp_path: Path) -> None:
    page = daemon_module.REPOSITORY / "deploy" / "metrics.md"
    # Some metrics exist only with tokens, a state folder or a store.
    tokens = tmp_path / "tokens"
    weftctl = daemon_module.BUILD_DIR / "client" / "weftctl" / "weftctl"
    create = [str(weftctl), "token", "create", "t", "--file", str(tokens)]
    subprocess.run([*create, "--tenant", "acme"], check=True, stdout=subprocess.DEVNULL)
    pages = []
    for state in (
        ("--state-dir", str(tmp_path / "state")),
        ("--state", (tmp_path / "store").as_uri()),
    ):
        with daemon_module.running(
            tiny_model("llama-tied"),
            tmp_path / state[0],
            *state,
            *("--auth-tokens-file", str(tokens)),
        ) as daemon:
            pages.append(daemon.scrape())
    made = metrics_table.table(*pages)
    text, _, _ = page.read_text("utf-8").partition(metrics_table.HEAD[0])
    fresh = tmp_path / page.name
    fresh.write_text(text + "\n".join(made) + "\n", "utf-8")
    assert len(made) > 60
    assert page.read_text("utf-8") == fresh.read_text("utf-8"), f"cp {fresh} {page}"


def _values(page: str) -> dict[str, float]:
    """Returns the sum over all labels for each sample name."""
    sums: dict[str, float] = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            name = series.split("{")[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def _moved(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


def test_client_side_preference_loss(
    daemon_for: Any, unique: Any, tmp_path: Path
) -> None:
    """Tests a DPO loss that the user wrote. The accumulated gradient is the
    gradient of this loss, and training raises the margin."""
    daemon = daemon_for("llama-tied")
    chosen = next_token(random_tokens(VOCAB, 14, 1))
    rejected = next_token(random_tokens(VOCAB, 17, 2))
    with daemon.client() as client:
        adapter = client.create_adapter(unique("dpo"), rank=8, seed=1)
        base = [r.logprobs.sum() for r in adapter.forward([chosen, rejected]).results]

        def dpo(logprobs: list[np.ndarray]) -> tuple[float, list[np.ndarray]]:
            sums = [float(lp.sum()) for lp in logprobs]
            margin = 0.5 * ((sums[0] - base[0]) - (sums[1] - base[1]))
            loss = float(np.log1p(np.exp(-margin)))
            slope = -0.5 / (1.0 + np.exp(margin))
            ones = [np.ones_like(lp) for lp in logprobs]
            return loss, [slope * ones[0], -slope * ones[1]]

        losses = []
        for _ in range(5):
            result = adapter.forward_backward_custom([chosen, rejected], dpo)
            losses.append(result.metrics["loss:sum"])
            adapter.optim_step(learning_rate=1e-2)
        assert losses[0] == pytest.approx(np.log(2.0), abs=1e-3)
        assert losses[-1] < 0.5 * losses[0]
        # The same step, written as signed weights, runs on an equal adapter.
        twins = [client.create_adapter(unique("twin"), rank=8, seed=2) for _ in "ab"]
        for twin in twins:
            twin.forward_backward([chosen, rejected])
            twin.optim_step(learning_rate=1e-2)
        base = [r.logprobs.sum() for r in twins[0].forward([chosen, rejected]).results]
        twins[0].forward_backward_custom([chosen, rejected], dpo)
        for sign, item in ((0.25, chosen), (-0.25, rejected)):
            weights = np.full(len(item.targets), sign, dtype=np.float32)
            data = type(item)(item.tokens, item.targets, weights)
            twins[1].forward_backward([data])
        custom, signed = (checkpoints.gradients(daemon, twin) for twin in twins)
    tolerance.assert_tensors(custom, signed, tolerance.GRADIENTS)


def test_reflection_lists_the_services(daemon_for: Any) -> None:
    with grpc.insecure_channel(daemon_for("llama-tied").address) as channel:
        ask: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        )
        # The bytes encode ServerReflectionRequest{list_services: ""}.
        answer = b"".join(ask(iter([b"\x3a\x00"]), timeout=10))
    for service in ("TrainingService", "SamplingService", "AdapterService"):
        assert f"weft.v1.{service}".encode() in answer
