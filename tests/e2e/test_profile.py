"""What an operator sees of the engine: the Chrome trace of a profile, and the trace
id of a request in the log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import daemon as daemon_module
import grpc
import pytest
from models import tiny_model
from raw import Raw, datum
from texts import random_tokens

from weft import methods
from weft._proto import adapters_pb2, server_pb2

VOCAB = 320
DATA = [datum(random_tokens(VOCAB, 40, seed)) for seed in range(4)]
PROMPT = [int(token) for token in random_tokens(VOCAB, 20, 7)]
STEPS = 60
# The parent of each span; "" if it has none.
PARENTS = {
    "pack": "train batch",
    "forward pass": "train batch",
    "head": "forward pass",
    "losses": "train batch",
    "backward pass": "train batch",
    "head backward": "backward pass",
    "layer backward": "backward pass",
    "wait for the device": "train batch",
    "add gradients": "train batch",
    "record batch": "train batch",
    "record step": "step alone",
    "optimizer step": "step alone",
    "prefill": "sample",
    "decode iteration": "sample",
    "wait for work": "",
    "train batch": "",
    "sample": "",
}
Span = dict[str, Any]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("profile")
    flags = ("--log-level", "debug", "--log-format", "json")
    with daemon_module.running(tiny_model("llama-tied"), folder, *flags) as started:
        yield started


def record(raw: Raw) -> list[Span]:
    """Returns the spans of STEPS pieces of work: training, optimizer steps, samples."""
    request = server_pb2.ProfileRequest(steps=STEPS, seconds=60)
    with ThreadPoolExecutor(1) as pool:
        profile = pool.submit(raw.drain_stream, methods.PROFILE, request, 90.0)
        while not profile.done():
            assert raw.forward_backward("seen", DATA).code == "OK"
            assert raw.optim_step("seen").code == "OK"
            assert raw.sample(PROMPT, config={"max_tokens": 8}).code == "OK"
    outcome = profile.result()
    assert outcome.code == "OK", outcome
    trace = json.loads(b"".join(message.trace for message in outcome.reply))
    assert trace["otherData"]["dropped_spans"] == 0
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return sorted(spans, key=lambda span: (span["ts"], -span["dur"]))


def with_parents(spans: Iterable[Span]) -> Iterator[tuple[str, str]]:
    """Yields each span's name and its parent's. Fails if a span outlasts its parent."""
    slack = 0.002  # Times are rounded to a nanosecond.
    open_spans: list[Span] = []
    for span in spans:
        while open_spans and open_spans[-1]["ts"] + open_spans[-1]["dur"] <= span["ts"]:
            open_spans.pop()
        parent = open_spans[-1] if open_spans else None
        if parent is not None:
            end = parent["ts"] + parent["dur"]
            assert span["ts"] + span["dur"] <= end + slack, (parent, span)
        yield span["name"], parent["name"] if parent is not None else ""
        open_spans.append(span)


def test_a_profile_shows_each_part_of_the_engines_work(daemon: Any) -> None:
    with Raw(daemon.address) as raw:
        assert raw.create("seen", rank=4).code == "OK"
        spans = record(raw)
    found: dict[str, set[str]] = {}
    for name, parent in with_parents(spans):
        found.setdefault(name, set()).add(parent)
    for name, parent in PARENTS.items():
        assert found.get(name) == {parent}, (name, found.get(name))
    assert found["layer forward"] == {"forward pass", "pass over pages"}
    layers = {s["args"]["layer"] for s in spans if s["name"] == "layer backward"}
    assert layers == {0, 1, 2}
    # The engine's thread is in a span nearly all of the time.
    parents = [parent for _, parent in with_parents(spans)]
    top = [s for s, parent in zip(spans, parents, strict=True) if not parent]
    covered = sum(s["dur"] for s in top)
    whole = top[-1]["ts"] + top[-1]["dur"] - top[0]["ts"]
    assert covered > 0.9 * whole


def test_log_lines_of_a_request_have_its_trace_id(daemon: Any) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    metadata = [("traceparent", f"00-{trace}-00f067aa0ba902b7-01")]
    with grpc.insecure_channel(daemon.address) as channel:
        for method, request in (
            (methods.CREATE_ADAPTER, adapters_pb2.CreateAdapterRequest),
            (methods.DELETE_ADAPTER, adapters_pb2.DeleteAdapterRequest),
        ):
            _, call = method.bind(channel).with_call(
                request(adapter_id="traced"), metadata=metadata
            )
            assert ("weft-trace-id", trace) in call.trailing_metadata()
    expected = {"adapter created", "adapter deleted", "audit", "rpc"}
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        lines = map(json.loads, daemon.log_path.read_text("utf-8").splitlines())
        if expected == {line["msg"] for line in lines if line.get("trace_id") == trace}:
            return
        time.sleep(0.05)
    raise AssertionError(daemon.log_tail())
