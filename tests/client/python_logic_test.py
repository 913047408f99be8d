"""Tests the decisions about step numbers and retries, without any I/O."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from conftest import Patch

import weft
from weft._proto import adapters_pb2, sampling_pb2
from weft.channel import Security, check_target
from weft.errors import from_rpc_error, make_error, retry_hint
from weft.methods import GET_ADAPTER
from weft.operations import Call, Sleep
from weft.retry import next_delay
from weft.route import Route
from weft.routing import call_metadata
from weft.steps import Outcome, StepCounter
from weft.threads import ThreadDriver, _Run

POLICY = weft.RetryPolicy(max_attempts=4, initial_delay=1, max_delay=3, jitter=0)


def test_delays_grow_to_their_bound_and_end() -> None:
    error = make_error("UNAVAILABLE", "")
    delays = [next_delay(POLICY, n, error, 100) for n in (1, 2, 3, 4)]
    assert delays == [1, 2, 3, None]


def test_an_unreachable_server_is_waited_for_until_the_deadline() -> None:
    away = make_error("UNAVAILABLE", "")
    patient = weft.RetryPolicy(jitter=0)
    assert next_delay(patient, 1, away, 100) == 0.2
    assert next_delay(patient, 10_000, away, 100) == 5
    assert next_delay(patient, 10_000, away, 5) is None
    assert patient.time_left(10_000, away, 77) == 77
    assert POLICY.time_left(3, away, 77) == 3


def test_hints_are_followed_until_the_deadline() -> None:
    full = make_error("RESOURCE_EXHAUSTED", "", 2.5)
    assert next_delay(POLICY, 0, full, 100) == 2.5
    assert next_delay(POLICY, 0, full, 2) is None
    assert next_delay(POLICY, 0, full, 100, lambda low, high: high) == 2.5
    late = weft.RetryPolicy(jitter=0.2)
    assert next_delay(late, 0, full, 100, lambda low, high: high) == 3
    assert next_delay(weft.NO_RETRY, 0, full, 100) is None
    assert next_delay(POLICY, 1, make_error("RESOURCE_EXHAUSTED", ""), 9) is None
    assert next_delay(POLICY, 0, make_error("UNAVAILABLE", "", 7), 9) == 7
    # The client waits even if the server tells it to retry at once.
    assert next_delay(POLICY, 0, make_error("UNAVAILABLE", "", 0), 9) == 1


@pytest.mark.parametrize(
    ("trailers", "code"),
    [((), "UNAVAILABLE"), ((("weft-trace-id", "1"),), "CANCELLED")],
)
def test_a_call_that_a_servers_end_cuts_off_may_be_repeated(
    trailers: tuple[tuple[str, str], ...], code: str
) -> None:
    failure: Any = grpc.RpcError()
    failure.code = lambda: grpc.StatusCode.CANCELLED
    failure.details = lambda: "CANCELLED"
    failure.trailing_metadata = lambda: trailers
    assert from_rpc_error(failure).code == code


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (None, (None, True)),
        ("0", (0.0, True)),
        ("1500", (1.5, True)),
        ("-1", (None, False)),
        ("soon", (None, False)),
    ],
)
def test_hints_follow_grpcs_rule(
    text: str | None, hint: tuple[float | None, bool]
) -> None:
    trailers = {} if text is None else {"grpc-retry-pushback-ms": text}
    assert retry_hint(trailers) == hint
    error = make_error("UNAVAILABLE", "", hint[0])
    error.repeatable = hint[1]
    assert (next_delay(POLICY, 1, error, 100) is not None) == hint[1]


@pytest.mark.parametrize("code", ["INTERNAL", "ABORTED", "DEADLINE_EXCEEDED"])
def test_other_errors_are_not_repeated(code: str) -> None:
    assert next_delay(POLICY, 1, make_error(code, ""), 100) is None


def test_numbers_return_in_any_order_of_refusal() -> None:
    counter = StepCounter("a", 5)
    first, second = counter.take(), counter.take()
    counter.finish(second, Outcome.REFUSED)
    counter.finish(first, Outcome.REFUSED)
    assert counter.take().number == 5


def test_unknown_end_wants_a_refresh() -> None:
    counter = StepCounter("a", 1)
    counter.finish(counter.take(), Outcome.UNKNOWN)
    assert counter.needs_refresh()
    with pytest.raises(weft.FailedPrecondition, match="may have run"):
        counter.take()
    counter.reset(2)
    assert counter.take().number == 2


def test_unknown_end_amid_others_wants_a_resync() -> None:
    counter = StepCounter("a", 1)
    first = counter.take()
    later = counter.take()
    counter.finish(first, Outcome.UNKNOWN)
    assert later.withdrawn_because is None
    with pytest.raises(weft.FailedPrecondition, match="resync"):
        counter.needs_refresh()
    with pytest.raises(weft.FailedPrecondition, match="in flight"):
        counter.require_idle("resync")


def test_a_step_withdrawn_while_its_call_starts_is_cancelled(
    monkeypatch: Patch,
) -> None:
    counter = StepCounter("a", 1)
    refused, later = counter.take(), counter.take()
    call: Future[None] = Future()

    def start(_: Call) -> Future[None]:
        counter.finish(refused, Outcome.REFUSED)
        return call

    def operation() -> Any:
        request = adapters_pb2.GetAdapterRequest()
        yield Call("127.0.0.1:1", GET_ADAPTER, request, 30.0, later)

    driver = ThreadDriver(Route("127.0.0.1:1", Security()))
    monkeypatch.setattr(driver, "start", start)
    run: _Run[None] = _Run(driver, operation())
    run.resume()
    assert call.cancelled()
    with pytest.raises(weft.Cancelled):
        run.future.result(timeout=5)
    driver.close()


def test_a_cancelled_pause_ends_the_operation_at_once_and_for_good() -> None:
    ended = threading.Event()

    def operation() -> Any:
        try:
            yield Sleep(30.0)
            raise AssertionError("the step was sent again")
        finally:
            ended.set()

    driver = ThreadDriver(Route("127.0.0.1:1", Security()))
    run: _Run[None] = _Run(driver, operation())
    run.resume()
    run.cancel()
    with pytest.raises(weft.Cancelled):
        run.future.result(timeout=5)
    assert ended.is_set()
    driver.close()


@pytest.mark.parametrize(
    "adapter_id",
    ["ä", "a b", "a\n", "a\x7f", "a.", "-a", "a~", "~a", "a~b~c", "a" * 129]
    + ["t" * 65 + "~a", "a" * 9000],
)
def test_no_id_that_a_server_refuses_gets_into_metadata(adapter_id: str) -> None:
    """A header of 9 kB would end other calls of the same connection."""
    request = adapters_pb2.GetAdapterRequest(adapter_id=adapter_id)
    with pytest.raises(weft.InvalidArgument, match="adapter_id is") as no:
        call_metadata(request)
    assert len(str(no.value)) < 300 and "must match" in str(no.value)


@pytest.mark.parametrize("adapter_id", ["a", "a" * 128, "0.b_c-", "t" * 64 + "~a"])
def test_metadata_names_the_adapter(adapter_id: str) -> None:
    request = sampling_pb2.SampleRequest(adapter_id=adapter_id)
    assert call_metadata(request) == (("weft-adapter-id", adapter_id),)
    stream = sampling_pb2.SampleStreamRequest(request=request)
    assert call_metadata(stream) == call_metadata(request)
    assert call_metadata(adapters_pb2.GetAdapterRequest()) == ()


def test_metadata_names_the_checkpoint_of_a_sample() -> None:
    request = sampling_pb2.SampleRequest(adapter_id="a", checkpoint="c.1")
    named = (("weft-adapter-id", "a"), ("weft-checkpoint", "c.1"))
    assert call_metadata(request) == named
    assert call_metadata(sampling_pb2.SampleStreamRequest(request=request)) == named
    # The server refuses these.
    for name in ("ä", "a b", "a\n", "a" * 9000):
        request.checkpoint = name
        assert call_metadata(request) == named[:1]


@pytest.mark.parametrize(
    "target",
    ["a:1", "[::1]:65535", "dns:a:1", "dns:///a:1", "dns://8.8.8.8/a:1"]
    + ["ipv4:10.0.0.1:1,10.0.0.2:1", "ipv6:[::1]:1", "unix:a", "unix:///run/a"],
)
def test_targets_of_grpc_are_taken(target: str) -> None:
    check_target(target)


def test_a_step_has_the_epoch_of_its_number() -> None:
    counter = StepCounter("a", 1, epoch=7)
    slot = counter.take()
    assert (slot.number, slot.epoch) == (1, 7)
    counter.finish(slot, Outcome.STALE, "ended")
    with pytest.raises(weft.FailedPrecondition, match="resync"):
        counter.take()
    counter.reset(4, 9)
    slot = counter.take()
    assert (slot.number, slot.epoch) == (4, 9)


def test_a_refresh_does_not_change_the_epoch_by_itself() -> None:
    counter = StepCounter("a", 1, epoch=7)
    counter.finish(counter.take(), Outcome.UNKNOWN, "a deadline")
    assert counter.needs_refresh()
    counter.refresh(2, 7)
    assert counter.take().number == 2
    with pytest.raises(weft.FailedPrecondition, match="by another client"):
        counter.refresh(6, 8)
    with pytest.raises(weft.FailedPrecondition, match="by another client"):
        counter.needs_refresh()
    counter.reset(6, 8)
    assert counter.take().epoch == 8
