"""Tests refusals that need a model: of adapters that do not exist, of an import, and
of a gradient. A refused request changes nothing. The refusals of fields have tables in
tests/server, and test_every_field.py sends each field at its extremes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import exported
import pytest
from raw import Outcome, Raw, datum
from texts import next_token, random_tokens

VOCAB = 320
GOOD = datum([5, 6, 7, 8])
INVALID = "INVALID_ARGUMENT"


def check(outcome: Outcome, code: str, words: tuple[str, ...]) -> None:
    assert outcome.code == code, outcome
    for word in words:
        assert word in outcome.message, outcome.message
    assert "/tmp" not in outcome.message and "/src" not in outcome.message


@pytest.fixture(scope="module")
def canary(daemon_for: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An adapter with gradients and moments. All the bad requests of this file must
    leave its bytes unchanged and the daemon able to train it."""
    daemon = daemon_for("llama-tied")
    data = [next_token(random_tokens(VOCAB, 20, 1))]
    with daemon.client() as client:
        adapter = client.create_adapter("canary", rank=4, seed=1)
        adapter.forward_backward(data)
        adapter.optim_step(learning_rate=1e-2)
        first = adapter.forward_backward(data).metrics["loss:sum"]
        before = exported.saved(daemon, adapter, "before")
        yield daemon
        assert exported.saved(daemon, adapter, "after") == before
        adapter.optim_step(learning_rate=1e-2)
        assert adapter.forward_backward(data).metrics["loss:sum"] < first


@pytest.fixture(scope="module")
def raw(canary: Any) -> Any:
    with Raw(canary.address) as channel:
        channel.create("victim", rank=4)
        yield channel


def test_what_does_not_exist(raw: Raw) -> None:
    from weft import methods
    from weft._proto import adapters_pb2 as adapters

    missing = ("no-such-adapter",)
    check(raw.forward_backward("no-such-adapter", [GOOD]), "NOT_FOUND", missing)
    check(raw.forward("no-such-adapter", [GOOD]), "NOT_FOUND", missing)
    check(raw.optim_step("no-such-adapter"), "NOT_FOUND", missing)
    check(raw.sample([5], adapter_id="no-such-adapter"), "NOT_FOUND", missing)
    outcome = raw.sample([5], adapter_id="victim", snapshot="no-such-snapshot")
    check(outcome, "NOT_FOUND", ("no-such-snapshot",))
    for method in (methods.GET_ADAPTER, methods.DELETE_ADAPTER):
        request = method.request_type(adapter_id="no-such-adapter")
        check(raw.call(method, request), "NOT_FOUND", missing)
    load = adapters.LoadCheckpointRequest(adapter_id="victim", name="no-such-one")
    check(raw.call(methods.LOAD_CHECKPOINT, load), "NOT_FOUND", ("no-such-one",))
    gone = adapters.DeleteCheckpointRequest(adapter_id="victim", name="no-such-one")
    check(raw.call(methods.DELETE_CHECKPOINT, gone), "NOT_FOUND", ("no-such-one",))


def test_an_adapter_that_is_there_already(raw: Raw) -> None:
    """A repeated create call succeeds, except with another rank or after training."""
    assert raw.create("twice", rank=4, seed=1).code == "OK"
    assert raw.create("twice", rank=4, seed=1).code == "OK"
    check(raw.create("twice", rank=8, seed=1), "ALREADY_EXISTS", ("twice",))
    assert raw.forward_backward("twice", [GOOD]).code == "OK"
    check(raw.create("twice", rank=4, seed=1), "ALREADY_EXISTS", ("twice",))


def test_a_damaged_import(raw: Raw, canary: Any, tmp_path: Path) -> None:
    with canary.client() as client:
        files = exported.files(client.adapter("canary"), tmp_path / "good")
    name = "adapter_model.safetensors"
    files[name] = files[name][: len(files[name]) // 2]
    check(raw.import_files("damaged", list(files.items())), INVALID, (name,))


def test_a_gradient_that_is_not_finite_is_dropped(raw: Raw) -> None:
    """The loss weights of the datum are huge but finite. Their gradient overflows in
    the backward pass."""
    assert raw.create("overflow", rank=4, seed=1).code == "OK"
    assert raw.forward_backward("overflow", [GOOD]).code == "OK"
    assert raw.optim_step("overflow").code == "OK"
    huge = {**GOOD, "weights": [3e38, -3e38, 3e38]}
    outcome = raw.forward_backward("overflow", [huge, huge])
    if outcome.code == "OK":
        outcome = raw.optim_step("overflow")
    assert outcome.code == "FAILED_PRECONDITION", outcome
    assert raw.forward_backward("overflow", [GOOD]).code == "OK"
    assert raw.optim_step("overflow").code == "OK"
