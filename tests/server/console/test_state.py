"""Tests what the console's endpoint returns to each caller, and its reply's size."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from console_server import DATA, ConsoleServer
from fake_weftd import FakeWeftd
from token_file import Tokens

import weft

NUM_TOKENS = len(DATA[0].tokens)
MAX_BYTES = 256 << 10


@pytest.fixture(scope="module")
def server() -> Iterator[ConsoleServer]:
    with ConsoleServer() as running:
        yield running


def ids(state: Any) -> list[str]:
    return [adapter["id"] for adapter in state["adapters"]]


def test_an_adapter_has_its_steps_and_losses(server: ConsoleServer) -> None:
    with server.client() as client:
        adapter = client.create_adapter("steps", rank=4)
        for _ in range(3):
            adapter.forward_backward(DATA)
        adapter.optim_step(learning_rate=1e-3)
        adapter.forward(DATA)
        adapter.sample([1, 2], max_tokens=5)
        adapter.save("one")
    state = server.state(adapter="steps", checkpoints="1")
    (row,) = [a for a in state["adapters"] if a["id"] == "steps"]
    # Each loss is a mean: targets 2 and 3 have the canned losses 3/8 and 4/8.
    assert row["losses"] == [0.4375] * 3
    assert (row["rank"], row["step"]) == (4, 6)
    assert row["train_tokens"] == 4 * NUM_TOKENS
    assert row["sampled_tokens"] == 5
    selected = state["selected"]
    assert (selected["steps"], selected["losses"]) == ([1, 2, 3], [0.4375] * 3)
    assert selected["tokens"] == [NUM_TOKENS] * 3
    assert [c["name"] for c in selected["checkpoints"]] == ["one"]
    assert "checkpoints" not in server.state(adapter="steps")["selected"]
    assert "selected" not in server.state(adapter="nobody", checkpoints="1")


def test_several_adapters_are_compared_and_updates_have_norms(
    server: ConsoleServer,
) -> None:
    with server.client() as client:
        for name in ("pair-a", "pair-b"):
            adapter = client.create_adapter(name, rank=4)
            adapter.forward_backward(DATA)
            adapter.optim_step(learning_rate=1e-3)
        client.create_adapter("pair-c", rank=4).report({"reward": 1.0})
    state = server.state(q="pair-", compare="loss", adapter="pair-a")
    compared = {entry["id"]: entry for entry in state["compared"]}
    assert compared == {
        "pair-a": {"id": "pair-a", "name": "loss", "at": [0], "values": [0.4375]},
        "pair-b": {"id": "pair-b", "name": "loss", "at": [0], "values": [0.4375]},
        "pair-c": {"id": "pair-c", "name": "loss", "at": [], "values": []},
    }
    assert state["selected"]["update_steps"] == [2]
    assert len(state["selected"]["grad_norms"]) == 1
    assert "compared" not in server.state() and "history" not in server.state()


def test_a_surrogate_is_no_loss_and_the_clients_values_are(
    server: ConsoleServer,
) -> None:
    def row() -> Any:
        return next(a for a in server.state()["adapters"] if a["id"] == "prefers")

    with server.client() as client:
        adapter = client.create_adapter("prefers", rank=4)
        signed = weft.Datum.next_token([1, 2, 3])
        signed.weights = np.array([1, -1], dtype=np.float32)
        adapter.forward_backward([signed])
        assert row()["losses"] == []
        assert row()["accumulated_tokens"] == 2
        adapter.report({"loss": 0.6931, "accuracy": 0.5})
        adapter.optim_step()
        adapter.report({"loss": 0.25, "reward": math.inf})
        adapter.report({"eval_loss": 0.5}, optim_steps=7)
    assert row()["losses"] == [0.6931, 0.25]
    state = server.state(adapter="prefers", compare="eval_loss", q="prefers")
    selected = state["selected"]
    assert selected["surrogate"] and len(selected["losses"]) == 1
    assert selected["curves"] == [
        {"name": "accuracy", "at": [0], "values": [0.5]},
        {"name": "eval_loss", "at": [7], "values": [0.5]},
        {"name": "loss", "at": [0, 1], "values": [0.6931, 0.25]},
        {"name": "reward", "at": [1], "values": [None]},
    ]
    assert [(c["name"], c["at"]) for c in state["compared"]] == [("eval_loss", [7])]


def test_the_server_remembers_its_load(server: ConsoleServer) -> None:
    deadline = time.monotonic() + 20
    while not (history := server.state(history="1")["history"]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert all(len(point) == 3 for point in history)
    load = server.state()["load"]
    assert len(load["queue_wait"]) == len(load["first_token"]) == 2
    assert server.state()["server"]["silent_seconds"] == 0


def test_the_console_has_an_address_of_its_own() -> None:
    with FakeWeftd("--console-listen=127.0.0.1:0") as running:
        url = f"http://{running.http}"
        with urllib.request.urlopen(url + "/", timeout=20) as page:
            assert b"Weft" in page.read()
        with urllib.request.urlopen(url + "/console/v1/state", timeout=20) as reply:
            assert json.load(reply)["server"]["phase"] == "serving"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url + "/api/v1/healthz", timeout=20)


def test_errors_have_a_code_and_no_text(server: ConsoleServer) -> None:
    with server.client() as client:
        with pytest.raises(weft.NotFound):
            # Clients ask so to learn whether they must make the adapter.
            client.adapter("asked-first").info()
        for _ in range(2):
            with pytest.raises(weft.NotFound):
                client.delete_adapter("secret-word")
        with pytest.raises(weft.InvalidArgument):
            client.create_adapter("secret-text", rank=100_000)
    errors = server.state()["errors"]
    newest, older = errors[:2]
    assert (newest["rpc"], newest["code"]) == ("CreateAdapter", "INVALID_ARGUMENT")
    assert older["rpc"] == "DeleteAdapter"
    assert (older["reason"], older["count"]) == ("NO_SUCH_ADAPTER", 2)
    assert older["adapter"] == "secret-word"
    assert "secret-text" not in json.dumps(errors)
    assert "asked-first" not in json.dumps(errors)


def test_a_tenant_sees_its_own_and_an_admin_everything(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens")
    owner = tokens.add("owner", "acme", "train", "sample")
    reader = tokens.add("reader", "acme", "read")
    other = tokens.add("other", "birch", "train", "sample")
    admin = tokens.add("ops", "acme", "admin")
    with ConsoleServer(f"--auth-tokens-file={tokens.path}") as server:
        with server.client(owner) as client:
            client.create_adapter("hidden", rank=4).forward_backward(DATA)
            with pytest.raises(weft.NotFound):
                client.delete_adapter("unknown")
        with server.client(admin) as client, pytest.raises(weft.NotFound):
            client.delete_adapter("birch~unknown")
        own, theirs = server.state(reader), server.state(other, adapter="hidden")
        every = server.state(admin, adapter="acme~hidden")
    assert ids(own) == ["hidden"]
    assert own["tokens"]["train"] == NUM_TOKENS
    assert own["queued"] == {"all": 0}
    assert [(e["adapter"], e["tenant"]) for e in own["errors"]] == [("unknown", "acme")]
    assert "load" not in own and "tenants" not in own
    assert own["caller"] == {"token": "reader", "tenant": "acme", "sees_all": False}

    assert (theirs["adapters"], theirs["num_adapters"]) == ([], 0)
    assert (theirs["errors"], theirs["tokens"]["train"]) == ([], 0)
    assert "selected" not in theirs
    assert not {"hidden", "acme"} & set(json.dumps(theirs).split('"'))

    assert ids(every) == ["acme~hidden"]
    assert every["selected"]["steps"] == [1]
    assert [t["tenant"] for t in every["tenants"]] == ["acme"]
    assert every["tenants"][0]["train_tokens"] == NUM_TOKENS
    assert {e["adapter"] for e in every["errors"]} == {"acme~unknown", "birch~unknown"}
    assert "load" in every


def test_a_bad_token_gets_no_data(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens")
    good = tokens.add("reader", "acme", "read")
    with ConsoleServer(f"--auth-tokens-file={tokens.path}") as server:
        for token in (None, "", "weft_guess", good + "x", f"tml-{good}"):
            status, headers, body = server.get("/console/v1/state", token)
            assert (status, list(json.loads(body))) == (401, ["detail"]), token
            assert good not in body.decode()
            assert headers["Cache-Control"] == "no-store"
        assert server.get("/console/v1/state", good)[0] == 200


def test_the_page_needs_no_token_and_holds_no_data(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens")
    owner = tokens.add("owner", "acme", "train")
    with ConsoleServer(f"--auth-tokens-file={tokens.path}") as server:
        with server.client(owner) as client:
            client.create_adapter("hidden", rank=4)
        files = ["/", *(f"/console/v1/{name}" for name in ("main.js", "console.css"))]
        for path in files:
            status, headers, body = server.get(path)
            assert status == 200 and b'hidden"' not in body and b"acme" not in body
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
        for path in ("/x", "/console/v1/", "/console/v1/index.html", "/console/v1/.."):
            assert server.get(path)[0] == 404, path


def test_a_thousand_adapters_give_a_bounded_answer() -> None:
    with ConsoleServer("--max-adapters=1001") as server:
        with server.client() as client:
            for i in range(1000):
                client.create_adapter(f"{i:04d}-{'n' * 60}", rank=4)
            for i in range(300, 540):
                for _ in range(3):
                    client.adapter(f"{i:04d}-{'n' * 60}").forward_backward(DATA)
        status, _, body = server.get("/console/v1/state")
        assert status == 200 and len(body) < MAX_BYTES
        state = json.loads(body)
        assert (state["num_adapters"], state["num_matching"]) == (1000, 1000)
        # The reply lists the 200 adapters that were used last, in the order of ids.
        assert [name[:4] for name in ids(state)] == [
            f"{i:04d}" for i in range(340, 540)
        ]
        found = server.state(q="0007-N")
        assert (found["num_adapters"], found["num_matching"]) == (1000, 1)
        assert [name[:4] for name in ids(found)] == ["0007"]
