"""Runs the unmodified Tinker SDK with the real daemon, and compares its numbers
with those of the gRPC client."""

from __future__ import annotations

import http.client
import io
import json
import tarfile
import time
import urllib.request
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from raw_client import RawClient
from tinker_daemon import TinkerDaemon

import weft

TOKENS = np.array([3, 17, 5, 42, 8, 30, 11, 2])
WEIGHTS = [1.0, 0.5, 0.0, -0.25, 1.0, 2.0, 1.0]
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPTIONS: dict[str, Any] = {
    "ppo": {"clip_low": 0.9, "clip_high": 1.1},
    "dro": {"beta": 0.1},
}


def test_numbers_are_those_of_the_grpc_client(server: TinkerDaemon) -> None:
    out = server.run("train")
    assert out["models"] == ["toy"]
    assert out["info"]["model_id"] == out["model_id"]
    assert out["info"]["lora_rank"] == 8
    with server.server.client() as client:
        adapter = client.create_adapter(
            "twin", rank=8, seed=7, target_modules=[*MODULES, "lm_head"]
        )
        plain = weft.Datum(TOKENS[:-1], TOKENS[1:], weights=WEIGHTS)
        policy = weft.Datum(
            TOKENS[:-1],
            TOKENS[1:],
            logprobs=[-4.0 - 0.1 * i for i in range(7)],
            advantages=[(-1.0) ** i * 0.5 for i in range(7)],
        )
        forward = adapter.forward([plain], score_all=True)
        assert 0 in WEIGHTS and (forward.results[0].logprobs < 0).all()
        np.testing.assert_array_equal(
            np.asarray(out["forward"][0], np.float32), forward.results[0].logprobs
        )
        for loss, metric in out["losses"].items():
            data = plain if loss == "cross_entropy" else policy
            result = adapter.forward_backward(
                [data, data], loss, score_all=True, **OPTIONS.get(loss, {})
            )
            assert result.metrics["loss:sum"] == metric, loss
        step = adapter.optim_step(learning_rate=1e-3, max_grad_norm=1.0)
        assert step.grad_norm == out["grad_norm"]
        after = adapter.forward([weft.Datum(TOKENS[:-1], TOKENS[1:])])
        np.testing.assert_array_equal(
            np.asarray(out["after"][0], np.float32), after.results[0].logprobs
        )


def test_sdks_up_to_0_33_download_an_archive(server: TinkerDaemon) -> None:
    """They ask for a redirect to it, for checkpoints of each kind."""
    client = RawClient(server)
    model = client.model(client.session())
    paths = [
        client.result(client.must(save, model_id=model, seq_id=seq, path="kept"))[
            "path"
        ]
        for seq, save in enumerate(
            ("save_weights", "save_weights_for_sampler", "save_weights_external"), 1
        )
    ]
    host = server.url.removeprefix("http://")
    for path in paths:
        run, _, checkpoint = path.removeprefix("tinker://").partition("/")
        connection = http.client.HTTPConnection(host, timeout=60)
        where = f"/api/v1/training_runs/{run}/checkpoints/{checkpoint}/archive"
        connection.request("GET", where, headers={"X-API-Key": "tml-any"})
        reply = connection.getresponse()
        assert reply.status == 302, reply.read()
        expires = parsedate_to_datetime(reply.headers["Expires"])
        assert 3000 < expires.timestamp() - time.time() < 3700
        # The URL needs no key.
        with urllib.request.urlopen(reply.headers["Location"]) as sent:
            archive = io.BytesIO(sent.read())
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            names = tar.getnames()
            weights = tar.extractfile("adapter_model.safetensors")
            config = tar.extractfile("adapter_config.json")
            assert weights is not None and config is not None
            assert json.loads(config.read())["r"] == 4
            assert len(safetensors.numpy.load(weights.read())) > 0
        assert names == [
            *("adapter_config.json", "adapter_model.safetensors"),
            "checkpoint_complete",
        ]
        connection.close()


def test_refusals_have_a_category_and_leave_no_gap(server: TinkerDaemon) -> None:
    messages = server.run("refused")["messages"]
    assert len(messages) == 3
    assert "data[0].loss_fn_inputs.target_tokens[1] is 1000000" in messages[0][0]
    assert "data[0]: loss_fn_input_spans covers 0 of 7 targets" in messages[1][0]
    assert "age_encryption_recipients is not offered" in messages[2][0]
    assert all("user" in category.lower() for _, category in messages)


def test_the_cookbooks_default_loss_learns_from_old_samples(
    server: TinkerDaemon,
) -> None:
    out = server.run("reinforce")
    rewards, metrics = out["rewards"], out["metrics"]
    # A random model draws ids below 160 of 320 half of the time.
    assert abs(rewards[0] - 0.5) < 0.2
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.2, rewards
    assert all(row["stable_reinforce_of_weft:mean"] == 1 for row in metrics)
    # The first samples are of the policy that trains, later ones of the one before.
    assert metrics[0]["kl_sample_train_v1:mean"] == pytest.approx(0, abs=1e-5)
    assert metrics[-1]["kl_sample_train_v1:mean"] > 1e-4
    assert metrics[0]["staleness:mean"] == 0 and metrics[-1]["staleness:mean"] == 1
    # Each answer has 8 tokens at most, and 16 are drawn.
    assert all(16 <= row["replayed_tokens:sum"] <= 128 for row in metrics)
    assert all(row["records_missing:sum"] == 0 for row in metrics)


def test_provenance_trains_with_the_servers_own_values(server: TinkerDaemon) -> None:
    server.begin("provenance")
    assert server.next_line() == "kill"
    server.server.kill()
    server.server.start()
    out = server.result()
    recorded, plain, again = out["metrics"]
    # With its own distribution and logprobs the policy's ratio is 1. The logprobs of
    # the client are -3, and those of the whole vocabulary are other ones.
    assert recorded["kl_sample_train_v1:mean"] == pytest.approx(0, abs=1e-5)
    assert abs(plain["kl_sample_train_v1:mean"]) > 0.1
    assert recorded["replayed_tokens:sum"] == again["replayed_tokens:sum"] == 12
    assert (recorded["records_missing:sum"], plain["records_missing:sum"]) == (0, 2)
    assert plain["replayed_tokens:sum"] == 0 and "staleness:mean" not in plain
    # The record outlives the server. Its values are two steps old by then.
    assert again["records_missing:sum"] == 0 and again["staleness:mean"] == 2
    trained, sampled = out["logprobs"][0]
    assert np.abs(np.subtract(trained, sampled)).max() < 1e-4


def test_dimuon_is_the_grpc_clients_muon(server: TinkerDaemon) -> None:
    server.begin("dimuon")
    assert server.next_line() == "kill"
    server.server.kill()
    server.server.start()
    out = server.result()
    assert out["repeated"] == out["norms"][2]
    assert out["types"] == ["dimuon", "dimuon", "adamw", *["dimuon"] * 3]
    for mixed in out["mixed"][:2]:
        assert "the model was made for the optimizer dimuon" in mixed
    assert "the model was made for the optimizer adamw" in out["mixed"][2]
    with server.server.client() as client:
        adapter = client.create_adapter(
            "muon-twin", rank=8, seed=7, target_modules=[*MODULES, "lm_head"]
        )
        data = [weft.Datum(TOKENS[:-1], TOKENS[1:])]
        for norm in out["norms"]:
            adapter.forward_backward(data)
            step = adapter.optim_step(
                optimizer="muon", learning_rate=1e-2, momentum=0.8, max_grad_norm=1.0
            )
            assert step.grad_norm == norm
        after = adapter.forward(data)
        np.testing.assert_array_equal(
            np.asarray(out["logprobs"][0], np.float32), after.results[0].logprobs
        )


def test_custom_losses_run_on_the_server(server: TinkerDaemon) -> None:
    out = server.run("custom_on_server")
    assert len(out["losses"]) == 5
    for name, ways in out["losses"].items():
        ours, sdks = ways["server"], ways["client"]
        assert ours["norm"] == pytest.approx(sdks["norm"], rel=1e-5), name
        assert ours["norm"] > 0, name
        assert set(ours["metrics"]) == set(sdks["metrics"]), name
        assert ours["metrics"] == pytest.approx(sdks["metrics"], rel=1e-5, abs=1e-5)
    (bad, category), (unfit, other) = out["errors"]
    assert "graph.nodes[1] (cumprod) has the target cumprod" in bad
    assert "data[0]: loss.custom_loss.graph.nodes[2] (mul) The size" in unfit
    assert "user" in category.lower() and "user" in other.lower()
    assert out["norm"] > 0


def test_snapshots_stay_frozen(server: TinkerDaemon) -> None:
    out = server.run("sample")
    assert out["before"] == out["after"] == out["loaded"]
    assert [len(tokens) for tokens in out["drawn"]] == [5, 5, 5]
    assert all(value <= 0 for row in out["drawn_logprobs"] for value in row)
    assert out["prompt_logprobs"][0] is None
    assert len(out["prompt_logprobs"]) == len(TOKENS)
    assert out["both"]
    for own, row in zip(out["prompt_logprobs"][1:], out["top"][1:], strict=True):
        values = [value for _, value in row]
        assert len(row) == 4 and values == sorted(values, reverse=True)
        # The prompt's own token is among the top tokens or less likely than they are.
        assert own <= values[-1] or min(abs(own - v) for v in values) < 1e-4
    assert not out["top"][0] and len(out["top"]) == len(TOKENS)
    # With prompt_logprobs_last_n=2, all rows except the last two are None.
    assert out["last_top"] == [None] * (len(TOKENS) - 2) + out["top"][-2:]
    assert [value is None for value in out["last_logprobs"]] == [
        value is None for value in out["last_top"]
    ]
    proto, text = out["top_forms"]
    assert proto["topk_prompt_logprobs"] == out["top"]
    assert len(proto["sequences"][0]["topk_logprobs"][0]) == 2
    assert text == proto
    assert out["stopped"][0] == [out["stopped"][1]]
    assert out["stop_reason"] == "stop"


def test_clients_in_flight_follow_the_weights(server: TinkerDaemon) -> None:
    server.begin("in_flight")
    assert server.next_line() == "kill"
    server.server.kill()
    server.server.start()
    out = server.result()
    assert out["drawn"] == [400, 400]
    np.testing.assert_allclose(out["start"], out["before"], atol=1e-4)
    for name in ("first", "second"):
        np.testing.assert_allclose(out[name], out["end"], atol=1e-4)
    assert max(np.abs(np.subtract(out["end"], out["start"]))) > 0.1


def test_sampling_clients_of_checkpoints_take_no_adapter(
    server: TinkerDaemon, tmp_path: Path
) -> None:
    """The server has room for one adapter, and keeps one checkpoint at a time."""
    flags = ("--max-adapters", "1", "--sampler-cache-adapters", "1")
    with TinkerDaemon(tmp_path, *flags) as small:
        out = small.run("from_checkpoints")
        with small.server.client() as client:
            assert len(client.adapters()) == 1
    assert out["models"][0] != out["models"][1]
    assert out["paths"] == [out["models"]] * 20
    # An older client never draws from newer weights.
    assert out["before"] == out["models"][1] != out["latest"] == out["after"]
    assert "user" in out["failure"].lower(), out["failure"]
    assert "model_path: the checkpoint was overwritten at" in out["failure"]


def test_scores_and_draws_of_a_prompt(server: TinkerDaemon) -> None:
    out = server.run("prompt_scores")
    tokens, count = out["tokens"], len(out["tokens"]) - 1
    own, likely = out["logprobs"], out["top"]
    dense = np.array(out["dense"])
    assert dense.shape == (count, 3) and (dense[:, 2] == 0).all()
    np.testing.assert_allclose(dense[:, 0], own[1:], atol=1e-5)
    assert np.exp(dense[:, 1]).min() > 0 and dense[:, 1].max() < 0
    # With 100 likely tokens a position has most of the other tokens, too.
    assert [len(row) for row in likely[1:]] == [100] * count
    rows = [dict(map(tuple, row)) for row in likely[1:]]
    listed = [i for i, row in enumerate(rows) if i in row]
    assert len(listed) > 5
    values = [rows[i][i] for i in listed]
    np.testing.assert_allclose(dense[listed, 1], values, atol=1e-4)
    sparse, same_columns = out["sparse"]
    np.testing.assert_allclose(sparse, dense[:, :2].ravel(), atol=1e-5)
    assert same_columns
    drawn, logprobs = map(np.array, out["alternatives"])
    assert drawn.shape == logprobs.shape == (count, 3)
    assert drawn.min() >= 0 and logprobs.max() <= 0 and len(set(drawn.ravel())) > 20
    assert out["hits"] == [0, 32]
    assert out["last"][:-4] == [None] * (len(tokens) - 4)
    np.testing.assert_allclose(out["last"][-4:], own[-4:], atol=1e-4)


def test_accounts(server: TinkerDaemon) -> None:
    out = server.run("accounts")
    assert out["who"] == {
        "user_urn": "weft:token:anyone",
        "org_urn": "tml:organization:weft",
        "email": None,
    }
    assert len(out["base"]) == 6 and out["base"] == out["by_path"] == out["by_copy"]
    path, copy = out["path"], out["copy"]
    assert copy != path and copy.endswith("/sampler_weights/kept")
    made, reads = out["events"][:2], out["events"][2:]
    assert made == [["checkpoint_create", path], ["checkpoint_copy", copy]]
    # The two loads may run at the same time.
    assert sorted(reads) == sorted(["checkpoint_read", p] for p in (path, copy))
    assert out["used"] == {"training": 7}
    assert out["stored"] >= 2 and out["summary"] == [1, "active"]


def test_checkpoints(server: TinkerDaemon) -> None:
    out = server.run("checkpoints")
    assert out["repeated"] == out["copied"] == out["ahead"]
    assert "one-not" in out["missing"]
    assert out["path"] in out["listed"]
    assert out["path"] not in out["left"]
    assert out["rank"] == 8
    assert out["run"] in out["runs"]
    assert out["path"].startswith(f"tinker://{out['run']}/weights/")
    assert out["sizes"]["adapter_model.safetensors"] > 1000


def test_the_rest_client(server: TinkerDaemon) -> None:
    out = server.run("rest")
    assert out["session"] and out["mine"] and out["again"] == 1
    assert out["runs"] == [out["model_id"]] and out["run"] == out["model_id"]
    assert out["base"] == "toy" and out["expires"] == [None]
    assert len(out["refusals"]) == 5, out["refusals"]


def test_chunks_of_a_call_may_arrive_in_any_order(server: TinkerDaemon) -> None:
    out = server.run("chunks")
    assert out["count"] == 30
    assert np.isfinite(out["loss"]) and out["grad_norm"] > 0
