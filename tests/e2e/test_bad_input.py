"""Tests that every refusal has the right code and names what was wrong, and that a
refused request changes nothing."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exported
import pytest
from raw import Outcome, Raw, datum
from texts import next_token, random_tokens

VOCAB = 320
CONTEXT = 512
GOOD = datum([5, 6, 7, 8])
NAN, INFINITY = math.nan, math.inf
INVALID = "INVALID_ARGUMENT"
POLICY = {"logprobs": [-1.0] * 3, "advantages": [1.0] * 3}

# Each entry has what is wrong, the datum's fields, and words of the error message.
BAD_DATA: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("empty", {"tokens": [], "targets": []}, ("tokens",)),
    ("id = vocab", {"tokens": [5, VOCAB, 7]}, ("tokens", "320")),
    ("id = 2^32 - 1", {"tokens": [5, 2**32 - 1, 7]}, ("tokens", "4294967295")),
    ("target = vocab", {"targets": [6, 7, VOCAB]}, ("targets", "320")),
    ("fewer targets", {"targets": [6, 7]}, ("targets",)),
    ("more targets", {"targets": [6, 7, 8, 9]}, ("targets",)),
    ("no targets", {"targets": []}, ("targets",)),
    ("fewer weights", {"weights": [1.0]}, ("weights",)),
    ("NaN weight", {"weights": [1.0, NAN, 1.0]}, ("weights",)),
    ("infinite weight", {"weights": [1.0, 1.0, -INFINITY]}, ("weights",)),
    ("both forms", {"tokens_le": struct.pack("<3I", 5, 6, 7)}, ("tokens",)),
    ("odd bytes", {"weights_le": b"\0" * 11}, ("weights",)),
    ("too long", {"tokens": [5] * 513, "targets": [5] * 513}, ("513", "512")),
    ("soft without weights", {"targets_per_token": 3}, ("targets",)),
    ("2^32 - 1 targets", {"targets_per_token": 2**32 - 1}, ("targets",)),
    ("no offset of the end", {"target_offsets": [0, 1, 2]}, ("target_offsets", "4")),
    ("late offset", {"target_offsets": [1, 1, 2, 3]}, ("target_offsets[0]",)),
    ("falling offset", {"target_offsets": [0, 2, 1, 3]}, ("target_offsets[2]",)),
    ("offset 2^32 - 1", {"target_offsets": [0, 1, 2**32 - 1, 3]}, ("4294967295",)),
    ("offsets end early", {"target_offsets": [0, 1, 1, 2]}, ("targets", "3", "2")),
    (
        "offsets and K",
        {"target_offsets": [0, 1, 2, 3], "targets_per_token": 2},
        ("targets_per_token", "target_offsets"),
    ),
)
BAD_POLICY: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("no logprobs", {"logprobs": []}, ("logprobs",)),
    ("no advantages", {"advantages": []}, ("advantages",)),
    ("positive logprob", {"logprobs": [-1.0, 0.5, -1.0]}, ("logprobs",)),
    ("infinite logprob", {"logprobs": [-1.0, -INFINITY, -1.0]}, ("logprobs",)),
    ("NaN advantage", {"advantages": [1.0, NAN, 1.0]}, ("advantages",)),
    ("fewer advantages", {"advantages": [1.0]}, ("advantages",)),
    ("ragged targets", {"target_offsets": [0, 1, 2, 3]}, ("target_offsets",)),
)
BAD_LOSS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("no function", {}, ("function",)),
    ("unknown function", {"function": 99}, ("function", "99")),
    ("temperature 0", {"function": 1, "temperature": 0.0}, ("temperature",)),
    ("temperature -1", {"function": 1, "temperature": -1.0}, ("temperature", "-1")),
    ("NaN temperature", {"function": 1, "temperature": NAN}, ("temperature",)),
    ("low > high", {"function": 3, "clip_low": 2.0}, ("clip",)),
    ("negative low", {"function": 3, "clip_low": -0.1}, ("clip_low",)),
    ("infinite high", {"function": 3, "clip_high": INFINITY}, ("clip_high",)),
    ("negative beta", {"function": 5, "beta": -1.0}, ("beta",)),
)
BAD_ADAMW: tuple[tuple[str, float], ...] = (
    ("learning_rate", NAN),
    ("learning_rate", -1.0),
    ("learning_rate", INFINITY),
    ("beta1", 1.0),
    ("beta1", -0.1),
    ("beta2", 1.0),
    ("beta2", NAN),
    ("eps", 0.0),
    ("eps", -1e-8),
    ("weight_decay", -0.1),
    ("weight_decay", INFINITY),
    ("max_grad_norm", -1.0),
    ("max_grad_norm", NAN),
)
BAD_SAMPLES: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("empty prompt", {"prompt": []}, ("prompt",)),
    ("id = vocab", {"prompt": [5, VOCAB]}, ("prompt", "320")),
    ("prompt fills context", {"prompt": [5] * CONTEXT}, ("prompt", "512")),
    ("2^32 - 1 samples", {"num_samples": 2**32 - 1}, ("num_samples",)),
    ("too many tokens", {"config": {"max_tokens": CONTEXT}}, ("max_tokens",)),
    ("negative T", {"config": {"temperature": -1.0}}, ("temperature",)),
    ("NaN T", {"config": {"temperature": NAN}}, ("temperature",)),
    ("top_p 0", {"config": {"top_p": 0.0}}, ("top_p",)),
    ("top_p 1.1", {"config": {"top_p": 1.1}}, ("top_p",)),
    ("top_p NaN", {"config": {"top_p": NAN}}, ("top_p",)),
    ("1025 logprobs", {"top_logprobs": 1025}, ("top_logprobs", "1025")),
    ("empty stop", {"config": {"stop": {"token_sequences": [{}]}}}, ("stop",)),
    ("stop id", {"config": {"stop": {"token_ids": [VOCAB]}}}, ("stop", "320")),
    ("65 stops", {"config": {"stop": {"token_ids": [3] * 65}}}, ("stop", "65")),
)
BAD_ADAPTERS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("rank over limit", {"rank": 2**31}, ("rank",)),
    ("alpha 0", {"alpha": 0.0}, ("alpha",)),
    ("alpha NaN", {"alpha": NAN}, ("alpha",)),
    ("alpha infinite", {"alpha": INFINITY}, ("alpha",)),
    ("unspecified target", {"target_modules": [0]}, ("target_modules",)),
    ("unknown target", {"target_modules": [99]}, ("target_modules", "99")),
    ("target twice", {"target_modules": [1, 1]}, ("target_modules",)),
)
BAD_NAMES = (
    "",
    ".",
    "..",
    "../etc",
    "a/b",
    "/etc/passwd",
    "a\\b",
    "a b",
    "a\n",
    "-rf",
    ".hidden",
    "dot.",
    "a" * 129,
    "naïve",
    "\U0001f600",
    "a\x00b",
)


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


def cases(table: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("fields", "words"), [row[1:] for row in table], ids=[row[0] for row in table]
    )


@cases(BAD_DATA)
def test_data(fields: Any, words: Any, raw: Raw) -> None:
    if "tokens" in fields and "targets" not in fields:
        fields = {"targets": [6] * len(fields["tokens"]), **fields}
    for call in (raw.forward_backward, raw.forward):
        outcome = call("victim", [GOOD, {**GOOD, **fields}])
        check(outcome, INVALID, ("data[1]", *words))


@cases(BAD_POLICY)
@pytest.mark.parametrize("function", (2, 3, 4, 5, 6))
def test_policy_inputs(fields: Any, words: Any, function: int, raw: Raw) -> None:
    bad = {**GOOD, **POLICY, **fields}
    outcome = raw.forward_backward("victim", [bad], loss={"function": function})
    check(outcome, INVALID, ("data[0]", *words))


@cases(BAD_LOSS)
def test_loss_config(fields: Any, words: Any, raw: Raw) -> None:
    outcome = raw.forward_backward("victim", [{**GOOD, **POLICY}], loss=fields)
    check(outcome, INVALID, words)


def test_no_data_and_too_much(raw: Raw) -> None:
    check(raw.forward_backward("victim", []), INVALID, ("data",))
    outcome = raw.forward_backward("victim", [datum([5, 6])] * 4097)
    check(outcome, INVALID, ("data", "4097", "4096"))


@pytest.mark.parametrize(("name", "value"), BAD_ADAMW)
def test_adamw_values(name: str, value: float, raw: Raw) -> None:
    check(raw.optim_step("victim", adamw={name: value}), INVALID, (name,))


@cases(BAD_SAMPLES)
def test_samples(fields: Any, words: Any, raw: Raw) -> None:
    from weft import methods
    from weft._proto import sampling_pb2

    values = {"prompt": [5, 6, 7], **fields}
    check(raw.sample(**values), INVALID, words)
    request = sampling_pb2.SampleStreamRequest(request=values)
    outcome = raw.drain_stream(methods.SAMPLE_STREAM, request, 30.0)
    check(outcome, INVALID, words)


@cases(BAD_ADAPTERS)
def test_adapter_shapes(fields: Any, words: Any, raw: Raw) -> None:
    check(raw.create("shapeless", **fields), INVALID, words)


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_names(name: str, raw: Raw) -> None:
    from weft import methods
    from weft._proto import adapters_pb2

    def refused(outcome: Outcome, field: str) -> None:
        assert outcome.code == INVALID, outcome
        assert field in outcome.message

    refused(raw.create(name, rank=4), "adapter_id")
    save = adapters_pb2.SaveCheckpointRequest(adapter_id="victim", name=name)
    refused(raw.call(methods.SAVE_CHECKPOINT, save), "name")
    load = adapters_pb2.LoadCheckpointRequest(adapter_id="victim", name=name)
    refused(raw.call(methods.LOAD_CHECKPOINT, load), "name")
    pin = adapters_pb2.PublishSnapshotRequest(adapter_id="victim", name=name)
    refused(raw.call(methods.PUBLISH_SNAPSHOT, pin), "name")


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


def test_what_the_base_model_cannot_do(raw: Raw) -> None:
    check(raw.forward_backward("", [GOOD]), INVALID, ("adapter_id",))
    check(raw.optim_step(""), INVALID, ("adapter_id",))
    check(raw.forward("", [GOOD], step=1), INVALID, ("step",))
    check(raw.sample([5], snapshot="s"), INVALID, ("snapshot",))


def test_an_adapter_that_is_there_already(raw: Raw) -> None:
    """A repeated create call succeeds, except with another rank or after training."""
    assert raw.create("twice", rank=4, seed=1).code == "OK"
    assert raw.create("twice", rank=4, seed=1).code == "OK"
    check(raw.create("twice", rank=8, seed=1), "ALREADY_EXISTS", ("twice",))
    assert raw.forward_backward("twice", [GOOD]).code == "OK"
    check(raw.create("twice", rank=4, seed=1), "ALREADY_EXISTS", ("twice",))


def _truncated(tensors: bytes) -> bytes:
    return tensors[: len(tensors) // 2]


def _huge_header(tensors: bytes) -> bytes:
    return struct.pack("<Q", 2**63) + tensors[8:]


def _nan(tensors: bytes) -> bytes:
    return tensors[:-4] + struct.pack("<f", NAN)


def _renamed(tensors: bytes) -> bytes:
    return tensors.replace(b"q_proj.lora_A", b"q_proj.lora_C", 1)


def _empty(_: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", (_truncated, _huge_header, _nan, _renamed, _empty))
def test_damaged_imports(
    damage: Callable[[bytes], bytes], raw: Raw, canary: Any, tmp_path: Path
) -> None:
    with canary.client() as client:
        files = exported.files(client.adapter("canary"), tmp_path / "good")
    tensors = damage(files["adapter_model.safetensors"])
    config = files["adapter_config.json"]
    parts = [("adapter_config.json", config), ("adapter_model.safetensors", tensors)]
    outcome = raw.import_files("damaged", parts)
    assert outcome.code == INVALID, outcome
    assert "adapter_model.safetensors" in outcome.message


def test_strange_imports(raw: Raw, canary: Any, tmp_path: Path) -> None:
    with canary.client() as client:
        files = exported.files(client.adapter("canary"), tmp_path / "good")
    tensors = files["adapter_model.safetensors"]
    config = json.loads(files["adapter_config.json"])
    for parts in (
        [],
        [("adapter_model.safetensors", tensors)],
        [("adapter_config.json", files["adapter_config.json"])],
        [("adapter_config.json", b"{"), ("adapter_model.safetensors", tensors)],
        [("adapter_config.json", b"[" * 100_000)],
        [("../adapter_config.json", json.dumps(config).encode())],
        [("adapter_config.json", json.dumps({**config, "r": 5}).encode())]
        + [("adapter_model.safetensors", tensors)],
    ):
        outcome = raw.import_files("strange", parts)
        assert outcome.code == INVALID, (outcome, [name for name, _ in parts])


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
