"""Tests the synchronous Python client with fake_weftd."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import numpy as np
import pytest
from conftest import Sent, wait_until
from fake_weftd import GRAD_NORM, FakeWeftd

import weft

Code = grpc.StatusCode
DATA = [weft.Datum.next_token([1, 2, 3, 4], prompt_length=2)]


def test_next_token_masks_the_prompt() -> None:
    datum = weft.Datum.next_token([5, 6, 7, 8], prompt_length=2)
    assert datum.tokens.tolist() == [5, 6, 7]
    assert datum.targets.tolist() == [6, 7, 8]
    assert datum.weights is not None
    assert datum.weights.tolist() == [0, 1, 1]


def test_trains_and_returns_arrays(client: weft.Client) -> None:
    adapter = client.create_adapter("a", rank=4, target_modules=["q_proj"])
    result = adapter.forward_backward(DATA, return_entropy=True)
    assert result.step == 1 and not result.replayed
    expected = np.array([0, -0.5, -0.625], "<f4")
    np.testing.assert_allclose(result.results[0].logprobs, expected)
    assert result.results[0].logprobs.dtype == np.float32
    assert result.results[0].entropies is not None
    assert result.metrics["loss:sum"] == pytest.approx(1.125)
    optim = adapter.optim_step(learning_rate=1e-3, max_grad_norm=1.0)
    assert (optim.step, optim.version, optim.grad_norm) == (2, 2, GRAD_NORM)
    assert adapter.next_step == 3
    assert adapter.info().config.target_modules == ["q_proj"]


def test_scores_beside_the_steps(sent: Sent, client: weft.Client) -> None:
    adapter = client.create_adapter("a")
    adapter.forward_backward(DATA)
    result = adapter.score(DATA, snapshot="best", score_all=True)
    request = sent[-1]
    assert request.unnumbered and request.snapshot == "best" and request.step == 0
    assert np.all(result.results[0].logprobs != 0)
    assert adapter.next_step == 2
    client.adapter("a").submit.forward(DATA).result()
    assert adapter.info().last_step == 2


def test_a_score_does_not_wait_for_a_missing_step(
    server: FakeWeftd, sent: Sent, client: weft.Client
) -> None:
    adapter = client.create_adapter("a")
    server.retry_hint(2_000)
    server.refuse("Forward", grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    before = len(sent)
    missing, ahead = adapter.submit.forward(DATA), adapter.submit.forward(DATA)
    wait_until(lambda: len(sent) > before)  # So it is not the score that is refused.
    assert adapter.score(DATA).step == 0
    assert not missing.done() and not ahead.done()


def test_sends_raw_arrays_and_only_what_was_given(
    sent: Sent, client: weft.Client
) -> None:
    adapter = client.create_adapter("a")
    policy = weft.Datum([1, 2, 3], [2, 3, 4], None, [-1.0] * 3, [1.0] * 3)
    adapter.forward_backward([policy], "ppo", clip_low=0.7)
    request = sent[-1]
    assert request.data[0].tokens_le == np.array([1, 2, 3], "<u4").tobytes()
    assert not request.data[0].tokens
    assert request.loss.clip_low == 0.7
    assert not request.loss.HasField("clip_high")


def test_unknown_names_are_refused_before_a_number_is_used(client: weft.Client) -> None:
    adapter = client.create_adapter("a")
    with pytest.raises(weft.InvalidArgument, match="cross_entropy"):
        adapter.forward_backward(DATA, "mse")
    with pytest.raises(TypeError, match="clip_lo"):
        adapter.forward_backward(DATA, clip_lo=1.0)  # type: ignore[call-arg]
    with pytest.raises(weft.InvalidArgument, match="lm_head"):
        client.create_adapter("b", target_modules=["conv"])
    assert adapter.next_step == 1


def test_soft_targets_keep_their_shape(client: weft.Client) -> None:
    adapter = client.create_adapter("a")
    datum = weft.Datum([1, 2], [[3, 4], [5, 6]], np.full((2, 2), 0.5))
    result = adapter.forward([datum])
    assert result.results[0].logprobs.shape == (2, 2)


@pytest.mark.parametrize("as_array", [list, np.array])
def test_ragged_targets_go_flat_and_come_back_per_token(
    as_array: Any, sent: Sent, client: weft.Client
) -> None:
    adapter = client.create_adapter("a")
    targets = [as_array(row) for row in ([3, 4], [], [5])]
    weights = [as_array(row) for row in ([0.5, 0.0], [], [2.0])]
    ragged = weft.Datum([7, 8, 9], targets, weights)
    result = adapter.forward([ragged])
    datum = sent[-1].data[0]
    assert datum.targets_le == np.array([3, 4, 5], "<u4").tobytes()
    assert datum.weights_le == np.array([0.5, 0, 2], "<f4").tobytes()
    assert datum.target_offsets_le == np.array([0, 2, 2, 3], "<u4").tobytes()
    assert datum.targets_per_token == 0
    flat = result.results[0].logprobs
    assert flat.shape == (3,) and flat.flags.writeable
    logprobs = ragged.per_token(flat)
    losses = ragged.per_token(result.results[0].losses)
    assert [row.shape for row in losses] == [(2,), (0,), (1,)]
    np.testing.assert_allclose(logprobs[0], np.array([-0.5, 0], "<f4"))
    np.testing.assert_allclose(logprobs[2], np.array([-0.75], "<f4"))
    np.testing.assert_allclose(losses[2], np.array([1.5], "<f4"))


@pytest.mark.parametrize("count", [1, 2])
def test_targets_that_are_all_empty_are_ragged(count: int, client: weft.Client) -> None:
    datum = weft.Datum([1] * count, [[]] * count)
    assert datum.target_offsets is not None
    result = client.create_adapter("a").forward([datum]).results[0]
    rows = datum.per_token(result.logprobs)
    assert [row.shape for row in rows] == [(0,)] * count


def test_a_pickled_adapter_is_refused_with_the_way_out(
    client: weft.Client, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(weft.InvalidArgument) as refused:
        client.import_adapter("a", tmp_path)
    assert str(refused.value).endswith(f"no adapter_model.safetensors in {tmp_path}")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(weft.InvalidArgument, match="safe_serialization=True"):
        client.import_adapter("a", tmp_path)


def test_retries_with_the_same_number(server: FakeWeftd, client: weft.Client) -> None:
    adapter = client.create_adapter("a")
    for _ in range(2):
        server.refuse("ForwardBackward", Code.UNAVAILABLE, "restarting")
    assert adapter.forward_backward(DATA).step == 1
    tries = [step for rpc, step in server.arrived() if rpc == "ForwardBackward"]
    assert tries == [1, 1, 1]


def test_lost_reply_is_replayed_and_trains_once(
    server: FakeWeftd, client: weft.Client
) -> None:
    adapter = client.create_adapter("a")
    server.lose_reply("ForwardBackward")
    result = adapter.forward_backward(DATA)
    assert result.replayed and result.step == 1
    assert server.applied() == [("ForwardBackward", 1)]


def test_gives_up_after_the_attempts_and_asks_for_the_number(
    server: FakeWeftd, client: weft.Client
) -> None:
    adapter = client.create_adapter("a")
    for _ in range(4):
        server.lose_reply("ForwardBackward")
    with pytest.raises(weft.Unavailable):
        adapter.forward_backward(DATA)
    # The step has run, so the next step is number 2.
    assert adapter.optim_step().step == 2


def test_a_full_share_is_retried_only_with_a_hint(
    server: FakeWeftd, client: weft.Client
) -> None:
    adapter = client.create_adapter("a")
    server.retry_hint(20)
    server.refuse("OptimStep", Code.RESOURCE_EXHAUSTED, "full")
    assert adapter.optim_step().step == 1
    server.retry_hint(None)
    server.refuse("OptimStep", Code.RESOURCE_EXHAUSTED, "full")
    with pytest.raises(weft.ResourceExhausted) as caught:
        adapter.optim_step()
    assert caught.value.retry_after is None
    assert adapter.optim_step().step == 2


def test_a_negative_hint_forbids_repetition(
    server: FakeWeftd, client: weft.Client
) -> None:
    adapter = client.create_adapter("a")
    server.retry_hint(-1)
    server.refuse("OptimStep", Code.UNAVAILABLE, "never")
    with pytest.raises(weft.Unavailable) as caught:
        adapter.optim_step()
    assert caught.value.retry_after is None and not caught.value.repeatable
    assert [rpc for rpc, _ in server.arrived()].count("OptimStep") == 1


def test_hint_longer_than_the_deadline_is_reported(server: FakeWeftd) -> None:
    with weft.Client(server.target, timeout=10.0) as client:
        server.retry_hint(60_000)
        server.refuse("CreateAdapter", Code.RESOURCE_EXHAUSTED, "full")
        with pytest.raises(weft.ResourceExhausted) as caught:
            client.create_adapter("a")
        assert caught.value.retry_after == 60.0


def refusals(server: FakeWeftd) -> int:
    """Returns how many calls the server has refused for their tenant's share."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        lines = page.read().decode().splitlines()
    series = 'weft_requests_rejected_total{reason="quota"} '
    return sum(int(line.removeprefix(series)) for line in lines if series in line)


def test_calls_are_repeated_while_the_server_says_so() -> None:
    """Makes more calls than the server has memory for. Holds the server until there
    were nine attempts per call on average. max_attempts is 2, but a refusal with a
    retry hint does not count as an attempt."""
    policy = weft.RetryPolicy(max_attempts=2, initial_delay=0.01)
    with (
        FakeWeftd("--request-memory", "2MiB") as server,
        weft.Client(server.target, retry=policy, timeout=60) as client,
        ThreadPoolExecutor(32) as pool,
    ):
        server.retry_hint(20)
        server.hold()
        calls = [pool.submit(client.sample, [1], max_tokens=4) for _ in range(32)]
        while refusals(server) < 8 * 32:
            time.sleep(0.05)
        server.release()
        for call in calls:
            call.result(60)


def test_an_invalid_step_uses_its_number(client: weft.Client) -> None:
    adapter = client.create_adapter("a")
    with pytest.raises(weft.InvalidArgument, match="data") as refused:
        adapter.forward_backward([])
    assert refused.value.step_done
    assert adapter.forward_backward(DATA).step == 2


def test_number_of_a_step_that_is_not_accepted_is_used_again(
    server: FakeWeftd, client: weft.Client
) -> None:
    adapter = client.create_adapter("a")
    server.refuse("ForwardBackward", Code.PERMISSION_DENIED, "not you")
    with pytest.raises(weft.PermissionDenied):
        adapter.forward_backward(DATA)
    assert adapter.forward_backward(DATA).step == 1


def test_number_used_by_another_client_is_reported(client: weft.Client) -> None:
    first = client.create_adapter("a")
    second = client.adapter("a")
    first.forward_backward(DATA)
    with pytest.raises(weft.AlreadyExists):
        second.optim_step()
    with pytest.raises(weft.FailedPrecondition, match="resync"):
        second.optim_step()
    assert second.resync() == 2
    assert second.optim_step().step == 2


def test_pipelined_steps_run_in_order(server: FakeWeftd, client: weft.Client) -> None:
    adapter = client.create_adapter("a")
    server.hold()
    pending: list[Future[weft.TrainResult] | Future[weft.OptimResult]] = []
    for _ in range(4):
        pending.append(adapter.submit.forward_backward(DATA))
        pending.append(adapter.submit.optim_step())
    assert adapter.next_step == 9
    server.release()
    assert [future.result(10).step for future in pending] == list(range(1, 9))
    assert [step for _, step in server.applied()] == list(range(1, 9))


def test_steps_behind_a_failed_one_go_on(
    server: FakeWeftd, client: weft.Client
) -> None:
    adapter = client.create_adapter("a")
    server.fail_run("Forward", Code.INTERNAL, "no")
    server.hold()
    bad = adapter.submit.forward(DATA)
    later = adapter.submit.optim_step()
    server.release()
    with pytest.raises(weft.Internal) as failed:
        bad.result(10)
    assert failed.value.step_done
    assert later.result(10).step == 2


def test_refusal_amid_the_pipeline_withdraws_what_follows(
    server: FakeWeftd, client: weft.Client
) -> None:
    adapter = client.create_adapter("a")
    server.refuse("Forward", Code.PERMISSION_DENIED, "no")
    server.hold()
    good = adapter.submit.forward_backward(DATA)
    bad, later = adapter.submit.forward(DATA), adapter.submit.optim_step()
    server.release()
    assert good.result(10).step == 1
    with pytest.raises(weft.PermissionDenied):
        bad.result(10)
    with pytest.raises(weft.FailedPrecondition, match="withdrawn"):
        later.result(10)
    with pytest.raises(weft.FailedPrecondition, match="resync"):
        adapter.optim_step()
    assert adapter.resync() == 2
    assert adapter.optim_step().step == 2


def test_a_load_makes_a_lost_adapter_again_for_its_tenant_and_as_durable_as_asked(
    client: weft.Client,
) -> None:
    assert client.create_adapter("alone").info().tenant == "alone"
    adapter = client.create_adapter("a", tenant="alice")
    assert adapter.info().tenant == "alice"
    adapter.save("one")
    client.delete_adapter("a")
    loaded = adapter.load("one", durability="step")
    assert (loaded.tenant, loaded.durability) == ("alice", "step")
    assert adapter.load("one", durability="memory").durability == "step"
    with pytest.raises(weft.InvalidArgument, match="durability is 'disk'"):
        adapter.load("one", durability="disk")


def test_moves_peft_folders(client: weft.Client, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    weights = bytes(range(256)) * 9000
    (source / "adapter_config.json").write_text("{}")
    (source / "adapter_model.safetensors").write_bytes(weights)
    adapter = client.import_adapter("moved", source, tenant="alice", durability="step")
    assert adapter.info().tenant == "alice"
    assert adapter.info().durability == "step"
    adapter.export(tmp_path / "out")
    out = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert out["adapter_model.safetensors"] == weights
    assert out["adapter_config.json"] == b"{}"
    assert [path.name for path in tmp_path.iterdir() if "weft" in path.name] == []


def test_an_empty_file_arrives(client: weft.Client, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    client.import_adapter("moved", tmp_path).export(tmp_path / "out")
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == b""


def test_failed_export_leaves_nothing(
    server: FakeWeftd, client: weft.Client, tmp_path: Path
) -> None:
    adapter = client.create_adapter("a")
    for name in ("../evil", ".."):
        server.next_export({name: "x"})
        with pytest.raises(weft.DataLoss, match="file name"):
            adapter.export(tmp_path / "out")
    for files in ({}, {"another": "x"}):
        server.next_export({"adapter_config.json": "{}", **files})
        with pytest.raises(weft.DataLoss, match="ended"):
            adapter.export(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(weft.InvalidArgument, match=r"adapter_config\.json"):
        client.import_adapter("b", tmp_path)


def test_a_checkpoint_has_properties(client: weft.Client) -> None:
    adapter = client.create_adapter("a")
    with pytest.raises(weft.InvalidArgument, match="kind is 'other'"):
        adapter.save("one", kind="other")
    with pytest.raises(weft.InvalidArgument, match="cannot be sent"):
        adapter.save("one", ttl_seconds=-1)
    with pytest.raises(weft.InvalidArgument, match="metadata key"):
        adapter.save("one", metadata={"a/b": ""})
    saved = adapter.submit.save(
        "one", kind="sampler", metadata={"loss": "0.5"}, ttl_seconds=60, keep_newest=2
    ).result()
    assert saved == client.checkpoints("a")[0]
    assert (saved.kind, saved.metadata) == ("sampler", {"loss": "0.5"})
    assert saved.expires_at == saved.created_at + 60
    # The server has refused a save: its failure is its result.
    assert saved.last_step == 2


def test_a_load_by_another_client_fences_this_one(client: weft.Client) -> None:
    mine = client.create_adapter("a", rank=2)
    mine.forward_backward(DATA)
    mine.save("c")
    theirs = client.adapter("a")
    theirs.load("c")
    with pytest.raises(weft.AlreadyExists) as fenced:
        mine.optim_step()
    assert fenced.value.reason == "STEP_HAS_ANOTHER_PAYLOAD"
    with pytest.raises(weft.FailedPrecondition, match="resync"):
        mine.submit.optim_step()
    assert theirs.optim_step().step == 4
    mine.resync()
    assert mine.optim_step().step == 5


def test_a_load_that_fails_does_not_stop_this_client(client: weft.Client) -> None:
    adapter = client.create_adapter("a", rank=2)
    with pytest.raises(weft.NotFound):
        adapter.load("none")
    assert adapter.forward_backward(DATA).step == 2


def test_a_step_behind_an_interrupted_load_asks_for_its_number(
    server: FakeWeftd,
) -> None:
    # A shell that runs this in the background has it ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The load runs, its reply is lost, and the interrupt comes while the client waits.
    patient = weft.RetryPolicy(initial_delay=20.0, max_delay=20.0)
    with weft.Client(server.target, retry=patient) as client:
        adapter = client.create_adapter("a", rank=2)
        adapter.save("c")
        adapter.optim_step()
        server.lose_reply("LoadCheckpoint")

        def interrupt() -> None:
            wait_until(lambda: bool(client._driver.pausing))
            os.kill(os.getpid(), signal.SIGINT)

        thread = Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            adapter.load("c")
        thread.join()
        assert adapter.optim_step().step == 4


def test_checkpoints_travel_as_folders(client: weft.Client, tmp_path: Path) -> None:
    client.create_adapter("a", rank=2).save("c")
    client.download_checkpoint("a", "c", tmp_path / "c")
    assert (tmp_path / "c" / "trainer_state.json").read_bytes() == b"c"
    uploaded = client.upload_checkpoint("b", "d", tmp_path / "c")
    assert (uploaded.adapter_id, uploaded.name) == ("b", "d")
    with pytest.raises(weft.AlreadyExists):
        client.upload_checkpoint("b", "d", tmp_path / "c")
    client.upload_checkpoint("b", "d", tmp_path / "c", overwrite=True)
    (tmp_path / "c" / "trainer_state.json").unlink()
    with pytest.raises(weft.InvalidArgument, match=r"no trainer_state\.json"):
        client.upload_checkpoint("b", "e", tmp_path / "c")
    with pytest.raises(weft.NotFound):
        client.download_checkpoint("a", "none", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_checkpoints_and_snapshots(client: weft.Client) -> None:
    adapter = client.create_adapter("a")
    adapter.optim_step()
    assert adapter.save("one").last_step == 2
    with pytest.raises(weft.AlreadyExists) as refused:
        adapter.save("one")
    assert refused.value.step_done
    adapter.save("one", overwrite=True)
    adapter.save("two")
    assert {c.name for c in client.checkpoints("a")} == {"one", "two"}
    plain = client.checkpoints("a")[0]
    assert (plain.kind, plain.metadata, plain.expires_at) == ("train", {}, None)
    assert (plain.tenant, plain.base_model) == ("a", "canned")
    # The failed save took step number 3, the others 4 and 5.
    assert adapter.load("one").last_step == 4
    assert adapter.next_step == 7
    adapter.load("two", weights_only=True)
    assert adapter.next_step == 8
    assert adapter.snapshot("best") == adapter.info().version
    assert adapter.info().snapshots == ["best"]
    adapter.sample([1], snapshot="best")
    adapter.release_snapshot("best")
    brief = client.set_checkpoint_ttl("a", "one", 3600)
    assert brief.expires_at is not None and brief.expires_at >= time.time() + 3500
    assert client.set_checkpoint_ttl("a", "one", 0).expires_at is None
    client.delete_checkpoint("a", "one")
    with pytest.raises(weft.NotFound):
        client.delete_checkpoint("a", "one")
    with pytest.raises(weft.NotFound):
        client.set_checkpoint_ttl("a", "one", 60)


def test_lost_reply_to_a_deletion_is_a_success(
    server: FakeWeftd, client: weft.Client
) -> None:
    client.create_adapter("a")
    server.lose_reply("DeleteAdapter")
    client.delete_adapter("a")
    with pytest.raises(weft.NotFound):
        client.delete_adapter("a")


def test_lists_all_pages(client: weft.Client) -> None:
    names = [f"a{i:03}" for i in range(101)]  # One more than fits on a page.
    for name in names:
        client.create_adapter(name)
    assert [info.adapter_id for info in client.adapters()] == names


def test_info_health_and_drain(client: weft.Client) -> None:
    assert client.info().model.eos_token_ids == [2]
    assert client.healthy()
    client.drain()
    assert client.info().draining
    assert not client.healthy()
    client.undrain()
    assert not client.info().draining
    assert client.healthy()


def test_base_model_forward_has_no_step(client: weft.Client) -> None:
    assert client.forward(DATA).step == 0


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (Code.INVALID_ARGUMENT, weft.InvalidArgument),
        (Code.NOT_FOUND, weft.NotFound),
        (Code.ALREADY_EXISTS, weft.AlreadyExists),
        (Code.PERMISSION_DENIED, weft.PermissionDenied),
        (Code.UNAUTHENTICATED, weft.Unauthenticated),
        (Code.RESOURCE_EXHAUSTED, weft.ResourceExhausted),
        (Code.FAILED_PRECONDITION, weft.FailedPrecondition),
        (Code.ABORTED, weft.Aborted),
        (Code.OUT_OF_RANGE, weft.OutOfRange),
        (Code.UNIMPLEMENTED, weft.Unimplemented),
        (Code.INTERNAL, weft.Internal),
        (Code.UNAVAILABLE, weft.Unavailable),
        (Code.DATA_LOSS, weft.DataLoss),
        (Code.DEADLINE_EXCEEDED, weft.DeadlineExceeded),
        (Code.UNKNOWN, weft.WeftError),
    ],
)
def test_codes_become_classes(
    server: FakeWeftd, code: grpc.StatusCode, error: type[weft.WeftError]
) -> None:
    server.lose_reply("GetInfo", code, "because")
    with (
        weft.Client(server.target, retry=weft.NO_RETRY) as client,
        pytest.raises(error, match="because") as caught,
    ):
        client.info()
    assert caught.value.code == code.name
    assert type(caught.value) is error


def test_what_grpc_cuts_off_may_be_repeated(server: FakeWeftd) -> None:
    with weft.Client(server.target) as client:
        server.lose_reply("GetInfo", Code.CANCELLED, "CANCELLED")
        client.info()


def test_deadline_bounds_a_gap(server: FakeWeftd, client: weft.Client) -> None:
    client.create_adapter("a")
    with weft.Client(server.target, timeout=1.0) as hasty:
        adapter = hasty.adapter("a")
        adapter._counter.reset(7)
        with pytest.raises(weft.DeadlineExceeded):
            adapter.optim_step()
        assert adapter.optim_step().step == 1


def test_neither_the_package_nor_a_recipe_imports_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = """import sys; from pathlib import Path; from weft.recipes import Watch
with Watch(Path(), 1) as watch: watch.step(1, 1, {"loss": 1.0})
sys.exit("torch" in sys.modules)"""
    own = {**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=own, cwd=tmp_path)
    assert done.returncode == 0
    if importlib.util.find_spec("tensorboardX"):
        assert list(tmp_path.glob("events.*"))
