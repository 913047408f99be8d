"""Sends every field of every request at its extremes, and bytes that are not a
request.

The requests and their fields come from the descriptors, so that a new field is
tested at once. Every answer has a code that a client understands and comes within
SECONDS. Before and after each test, a canary adapter gives the same scores. At the end
its state is unchanged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import exported
import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from raw import Raw, datum

from weft import methods
from weft._proto import adapters_pb2, sampling_pb2, server_pb2, training_pb2

# Answers take milliseconds on an idle machine, or as long as a sync of the disk.
SECONDS = 5.0
# The codes that a bad request may get. gRPC returns INTERNAL for bytes that do
# not parse.
ANSWERS = {
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "DEADLINE_EXCEEDED",
}
NO_MESSAGE = ANSWERS | {"INTERNAL"}
FLOATS = (math.nan, math.inf, -math.inf, -0.0, 1e-40, 3.4e38, -3.4e38)
STRINGS = ("", "..", "a/b", "a\0b", "\u202e", "x" * 300, "\U0001f600", "%00")
BYTES = (b"", b"\0", b"\xff" * 3, b"\x7f" * 4)
SPREAD = {
    FieldDescriptor.CPPTYPE_INT32: (0, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (0, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: FLOATS,
    FieldDescriptor.CPPTYPE_FLOAT: FLOATS,
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 99, -1),
}
# How much the peak memory may grow over all calls. The largest call has 10 MB, and
# the server holds copies of it.
RESIDENT_LIMIT = 128 << 20


def requests() -> dict[str, Message]:
    """Returns valid requests of every method. A key is the method's name, or begins
    with it."""
    train: dict[str, Any] = {"adapter_id": "victim", "data": [datum([5, 6, 7, 8])]}
    policy: dict[str, Any] = {"logprobs": [-1.0] * 3, "advantages": [1.0] * 3}
    prompt: dict[str, Any] = {"prompt": [5, 6, 7], "config": {"max_tokens": 2}}
    return {
        "FORWARD": training_pb2.ForwardRequest(**train, loss={"function": 1}),
        "FORWARD with a teacher": training_pb2.ForwardRequest(
            adapter_id="victim",
            data=[datum([5, 6, 7, 8], teacher_tokens=[9, 5, 6, 7], teacher_offset=1)],
            loss={"function": 11, "teacher": {"adapter_id": "victim"}},
        ),
        "FORWARD_BACKWARD": training_pb2.ForwardBackwardRequest(
            adapter_id="victim",
            data=[datum([5, 6, 7, 8], **policy)],
            loss={"function": 3},
        ),
        "OPTIM_STEP": training_pb2.OptimStepRequest(
            adapter_id="victim", adamw={"learning_rate": 1e-3}
        ),
        "REPORT_METRICS": training_pb2.ReportMetricsRequest(
            adapter_id="victim", optim_steps=3, metrics={"loss": 0.5}
        ),
        "OPTIM_STEP of Muon": training_pb2.OptimStepRequest(
            adapter_id="muon-victim", muon={"learning_rate": 1e-3}
        ),
        "SAMPLE": sampling_pb2.SampleRequest(adapter_id="victim", **prompt),
        "CREATE_ADAPTER": adapters_pb2.CreateAdapterRequest(
            adapter_id="made", config={"rank": 2}
        ),
        "GET_ADAPTER": adapters_pb2.GetAdapterRequest(adapter_id="victim"),
        "LIST_ADAPTERS": adapters_pb2.ListAdaptersRequest(),
        "DELETE_ADAPTER": adapters_pb2.DeleteAdapterRequest(adapter_id="made"),
        "MOVE_ADAPTER": adapters_pb2.MoveAdapterRequest(adapter_id="victim", log=1),
        "SAVE_CHECKPOINT": adapters_pb2.SaveCheckpointRequest(
            adapter_id="victim", name="c", overwrite=True
        ),
        "LOAD_CHECKPOINT": adapters_pb2.LoadCheckpointRequest(
            adapter_id="victim", name="c"
        ),
        "LIST_CHECKPOINTS": adapters_pb2.ListCheckpointsRequest(adapter_id="victim"),
        "DELETE_CHECKPOINT": adapters_pb2.DeleteCheckpointRequest(
            adapter_id="victim", name="no"
        ),
        "SET_CHECKPOINT_TTL": adapters_pb2.SetCheckpointTtlRequest(
            adapter_id="victim", name="no"
        ),
        "PUBLISH_SNAPSHOT": adapters_pb2.PublishSnapshotRequest(
            adapter_id="victim", name="s"
        ),
        "RELEASE_SNAPSHOT": adapters_pb2.ReleaseSnapshotRequest(
            adapter_id="victim", name="s"
        ),
        "GET_INFO": server_pb2.GetInfoRequest(),
    }


def values_of(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.type == FieldDescriptor.TYPE_STRING:
        return STRINGS
    if field.type == FieldDescriptor.TYPE_BYTES:
        return BYTES
    return SPREAD[field.cpp_type]


def bent(message: Message) -> Iterator[tuple[str, Message]]:
    """Returns copies of the message in which one field, at any depth, has an
    extreme value."""
    for field in message.DESCRIPTOR.fields:
        for name, change in changes(message, field):
            copy = type(message)()
            copy.CopyFrom(message)
            change(copy)
            yield name, copy


Change = tuple[str, Callable[[Any], None]]


def changes(message: Message, field: FieldDescriptor) -> Iterator[Change]:
    name = field.name
    yield f"no {name}", lambda m: m.ClearField(name)
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            return
        inner: Any = getattr(message, name)
        if field.is_repeated:
            yield f"an empty {name}", lambda m: getattr(m, name).add()
            inner = inner[0] if len(inner) else type(getattr(message, name).add())()
        for deep, other in list(bent(inner)):
            yield f"{name}: {deep}", partial(put, field=field, inner=other)
        return
    for value in values_of(field):
        if field.is_repeated:
            yield f"{name} [{value!r}]", partial(fill, name=name, values=[value])
            yield f"{name} 3 x {value!r}", partial(fill, name=name, values=[value] * 3)
        else:
            yield f"{name} = {value!r}", partial(put_value, name=name, value=value)


def put(message: Any, field: FieldDescriptor, inner: Message) -> None:
    message.ClearField(field.name)
    place = getattr(message, field.name)
    (place.add() if field.is_repeated else place).CopyFrom(inner)


def put_value(message: Any, name: str, value: Any) -> None:
    setattr(message, name, value)


def fill(message: Any, name: str, values: list[Any]) -> None:
    message.ClearField(name)
    getattr(message, name).extend(values)


@pytest.fixture(scope="module")
def canary(daemon_for: Any) -> Iterator[Callable[[], Any]]:
    """Returns a function that checks the scores of an adapter and returns the daemon.
    No test names the adapter, so its scores must not change."""
    daemon = daemon_for("llama-tied")
    with daemon.client() as client, Raw(daemon.address) as channel:
        adapter = client.create_adapter("field-canary", rank=4, seed=1)
        channel.create("victim", rank=4)
        channel.create("muon-victim", rank=4)  # Its first step chooses Muon.
        before = exported.saved(daemon, adapter, "before")
        expected = channel.forward("field-canary", [datum([9, 8, 7, 6])]).reply.results

        def check() -> Any:
            outcome = channel.forward("field-canary", [datum([9, 8, 7, 6])])
            assert outcome.code == "OK", outcome
            assert outcome.reply.results == expected
            return daemon

        check()
        resident = daemon.peak_resident_bytes()
        yield check
        check()
        assert daemon.peak_resident_bytes() - resident < RESIDENT_LIMIT
        # Gets the adapter again: the first object does not know the step numbers that
        # the scores took.
        adapter = client.adapter("field-canary")
        assert exported.saved(daemon, adapter, "after") == before


@pytest.mark.parametrize("name", sorted(requests()))
def test_every_field_at_its_extremes(name: str, canary: Any) -> None:
    daemon = canary()
    method = getattr(methods, name.split()[0])
    with Raw(daemon.address) as channel:
        for what, request in bent(requests()[name]):
            start = time.monotonic()
            outcome = channel.call(method, request, timeout=10)
            seconds = time.monotonic() - start
            assert outcome.code in ANSWERS, (what, outcome)
            assert seconds < SECONDS, (what, seconds)
    canary()


def test_requests_are_tried_for_every_method() -> None:
    """Every unary method is tried except HEALTH_CHECK, DRAIN, which would end the
    server, and UNDRAIN. These have no fields."""
    unary = {
        name
        for name, value in vars(methods).items()
        if isinstance(value, methods.Method) and value.arity is methods.Arity.UNARY
    }
    assert unary - {name.split()[0] for name in requests()} == {
        "DRAIN",
        "UNDRAIN",
        "HEALTH_CHECK",
    }


GROUP = b"\x0b"  # The start of a group with field number 1.
HOSTILE = {
    "garbage": b"\xff" * 100,
    "a cut varint": b"\x08\x80",
    "a string longer than the message": b"\x0a\xff\xff\xff\xff\x07abc",
    "a length of 2^64 - 1": b"\x0a" + b"\xff" * 9 + b"\x01",
    "invalid UTF-8": b"\x0a\x02\xc3\x28",
    "groups 10,000 deep": GROUP * 10_000,
    "messages 10,000 deep": b"\x12\x7f" * 10_000,
    "10 MB of an unknown field": b"\xfa\x7f\x80\xad\xe2\x04" + b"x" * 10_000_000,
    "a million unknown varints": b"\xf8\x7f\x01" * 1_000_000,
}


@pytest.mark.parametrize("what", sorted(HOSTILE))
def test_bytes_that_are_no_request(what: str, canary: Any) -> None:
    daemon = canary()
    with grpc.insecure_channel(daemon.address) as channel:
        for name in requests():
            path = getattr(methods, name.split()[0]).path
            call: Any = channel.unary_unary(path)
            start = time.monotonic()
            try:
                call(HOSTILE[what], timeout=10)
                code = "OK"
            except grpc.RpcError as error:
                code = error.code().name
            assert code in NO_MESSAGE, (name, code)
            assert time.monotonic() - start < SECONDS, name
    canary()
