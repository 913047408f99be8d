"""Tests that neither one caller of the front for OpenAI's API nor a log that nobody
reads keeps other callers waiting, and that numbers and texts fit into JSON."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import pytest
from conftest import CLIENT, Patch, wait_until
from fronts import Bytes, byte_level, front_of, running
from small_server import SmallServer

from weft._proto import sampling_pb2
from weft.aio import AsyncClient
from weft.channel import Security
from weft.client import Client
from weft.convert import to_sample_delta
from weft.data import ModelTokenizer
from weft.openai_front import app as app_module
from weft.openai_front import log as log_module
from weft.openai_front.answers import Envelope, dumps, in_blocks
from weft.openai_front.app import Front
from weft.openai_front.log import MAX_PER_SECOND, MAX_WAITING, Log
from weft.openai_front.sampling import Job, stream
from weft.openai_front.text import Answer, Decoder

FOX = list("🦊".encode())


@pytest.fixture
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(Bytes())  # type: ignore[arg-type]


class Counting(Bytes):
    """Counts the tokens that it decodes. Token 0 is a special token."""

    decoded = 0

    def decode(self, tokens: Any, **_: Any) -> str:
        self.decoded += len(tokens)
        return super().decode([token for token in tokens if token])


@pytest.mark.parametrize("token", [FOX[0], FOX[1], 0, ord("a")])
def test_tokens_that_become_no_character_take_linear_time(token: int) -> None:
    counted = Counting()
    answer = Answer(ModelTokenizer(counted), [])  # type: ignore[arg-type]
    text = answer.add([token] * 3000) + answer.finish()
    assert text == bytes([token] * 3000).replace(b"\0", b"").decode(errors="replace")
    assert counted.decoded < 100 * 3000


@pytest.mark.parametrize("count", range(40))
@pytest.mark.parametrize(("token", "shown"), [(FOX[0], "\ufffd"), (0, "")])
def test_a_character_is_whole_after_any_number_of_other_tokens(
    token: int, shown: str, count: int
) -> None:
    decoder = Decoder(ModelTokenizer(Counting()))  # type: ignore[arg-type]
    pieces = [decoder.add(one) for one in [token] * count + FOX * 2]
    assert "".join(pieces) == shown * count + "🦊🦊"


@functools.cache
def long_reply() -> bytes:
    """Returns 500 tokens, each with 500 likely ones."""
    reply = sampling_pb2.SampleResponse()
    sample = reply.samples.add(tokens=[65] * 500, logprobs=[-1.0] * 500)
    for _ in sample.tokens:
        sample.top_logprobs.add(tokens=range(250), logprobs=[-1.0] * 250)
        sample.top_logprobs[-1].tokens.extend([66] * 250)
        sample.top_logprobs[-1].logprobs.extend([-2.0] * 250)
    return reply.SerializeToString()


def test_a_long_reply_is_read_by_both_clients(monkeypatch: Patch) -> None:
    async def read(target: str) -> Any:
        async with AsyncClient(target) as client:
            return await client.sample([5])

    with SmallServer() as server:
        monkeypatch.setattr(server, "_sample", lambda _: long_reply())
        with Client(server.target) as client:
            results = [client.sample([5]), asyncio.run(read(server.target))]
    for result in results:
        assert result.samples[0].top_logprobs[499][248:251] == [
            *((248, -1.0), (249, -1.0), (66, -2.0))
        ]


def test_others_are_served_while_a_long_answer_is_made(monkeypatch: Patch) -> None:
    long = long_reply()
    body = {"model": "toy", "prompt": [5], "max_tokens": 500, "logprobs": 500}
    tokenizer = ModelTokenizer(byte_level())
    with SmallServer() as server:
        monkeypatch.setattr(server, "_sample", lambda _: long)
        front = Front(server.target, tokenizer, Security())
        with (
            running(front) as (port, _),
            ThreadPoolExecutor(1) as pool,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as one,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as other,
        ):
            start = time.monotonic()
            ask = pool.submit(one.post, "/v1/completions", json=body)
            waits = []
            while not ask.done():
                before = time.monotonic()
                assert other.get("/metrics").is_success
                waits.append(time.monotonic() - before)
            took = time.monotonic() - start
    assert len(ask.result().json()["choices"][0]["logprobs"]["top_logprobs"]) == 500
    assert max(waits) < took / 3, (max(waits), took)


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        None,
        '\u00e9"',
        {"a": {}, "b": []},
        [[1.5, True], {"c": "d"}, "e"] * 9000,
    ],
)
@pytest.mark.parametrize("depth", range(4))
def test_an_answer_is_made_in_blocks(value: object, depth: int) -> None:
    blocks = list(in_blocks(dumps(value, depth)))
    assert json.loads(b"".join(blocks)) == value
    assert depth == 0 or all(len(block) < 2**16 + 100 for block in blocks)


@dataclass
class Drawn:
    """Weights that draw these tokens in a stream, one by one."""

    tokens: list[int]
    top: list[tuple[int, float]] = field(default_factory=list)

    async def sample_stream(self, *_: object) -> AsyncIterator[Any]:
        for token in self.tokens:
            part = sampling_pb2.SampleStreamResponse(tokens=[token], logprobs=[-1.0])
            for likely, logprob in self.top[:1]:
                part.top_logprobs.add(tokens=[likely], logprobs=[logprob])
            yield to_sample_delta(part)


def events(weights: Drawn, *, chat: bool = False, scored: bool = False) -> list[str]:
    job = Job(
        tokenizer=ModelTokenizer(Bytes()),  # type: ignore[arg-type]
        weights=weights,  # type: ignore[arg-type]
        envelope=Envelope("text_completion", "toy"),
        prompts=[[5]],
        options={},
        stops=[],
        chat=chat,
        scored=scored,
    )

    async def collect() -> list[str]:
        return [event async for event in stream(job)]

    return asyncio.run(collect())


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("chat", [False, True])
def test_a_token_that_cannot_be_drawn_has_a_number(
    tokenizer: ModelTokenizer, monkeypatch: Patch, chat: bool
) -> None:
    top = [(66, -math.inf)]
    for event in events(Drawn([65], top), scored=True, chat=chat)[:-1]:
        json.loads(event.removeprefix("data: "), parse_constant=refuse)
    reply = sampling_pb2.SampleResponse()
    reply.samples.add(tokens=[65, 65], logprobs=[-1.0, -math.inf])
    for logprob in (-math.inf, math.nan):
        reply.samples[0].top_logprobs.add(tokens=[66], logprobs=[logprob])
    with SmallServer() as server, front_of(server.target, tokenizer) as front:
        monkeypatch.setattr(server, "_sample", lambda _: reply.SerializeToString())
        body = {"model": "toy", "prompt": [5], "logprobs": 1}
        answer = front.post("/v1/completions", json=body)
    scores = answer.json()["choices"][0]["logprobs"]
    assert scores["token_logprobs"] == [-1.0, -9999.0]
    assert scores["top_logprobs"] == [{"B": -9999.0}] * 2


def test_events_have_no_other_line_breaks() -> None:
    text = "a\u2028b\u0085c\u2029"
    lines = [event.removesuffix("\n\n") for event in events(Drawn(list(text.encode())))]
    assert all(len(line.splitlines()) == 1 for line in lines)
    parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(part["choices"][0]["text"] for part in parts) == text


@pytest.mark.parametrize("name", ["\\ud800", "mine@\\udfff"])
def test_a_model_that_is_no_text_is_refused_by_name(
    tokenizer: ModelTokenizer, name: str
) -> None:
    body = f'{{"model": "{name}", "prompt": [5]}}'
    with SmallServer() as server, front_of(server.target, tokenizer) as front:
        head = {"Content-Type": "application/json"}
        refused = front.post("/v1/completions", content=body, headers=head)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "model"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe without room for a byte."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    try:
        while True:
            os.write(writable, b"\n")
    except BlockingIOError:
        os.set_blocking(writable, True)
    yield readable, writable
    os.close(readable)
    os.close(writable)


def test_a_log_that_nobody_reads_stops_nobody(pipe: tuple[int, int]) -> None:
    # No other test has this address, so none takes the port meanwhile.
    with socket.create_server(("127.0.0.2", 0)) as free:
        address = free.getsockname()
        place = "{}:{}".format(*address)
    with SmallServer() as server:
        command = [sys.executable, "-m", "weft", "openai", "--server", server.target]
        process = subprocess.Popen(
            [*command, "--listen", place],
            env={**os.environ, "PYTHONPATH": str(CLIENT)},
            stderr=pipe[1],
        )
        with httpx.Client(base_url=f"http://{place}", timeout=20) as other:

            def serves() -> bool:
                assert process.poll() is None
                try:
                    return other.get("/health").is_success
                except httpx.ConnectError:
                    return False

            wait_until(serves)
            for _ in range(2 * MAX_PER_SECOND):
                with socket.create_connection(address, 20) as stranger:
                    stranger.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
                    assert stranger.recv(200).startswith(b"HTTP/1.1 400")
            page = other.get("/metrics").text
        process.send_signal(signal.SIGTERM)
        process.wait(10)
    dropped = page.partition("\nweft_openai_log_lines_dropped_total ")[2]
    assert float(dropped) > 0


def test_lines_that_are_dropped_are_counted(
    pipe: tuple[int, int], monkeypatch: Patch
) -> None:
    now = 0.0
    monkeypatch.setattr(log_module, "_STDERR", pipe[1])
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log, before = Log(), Log.num_dropped
    record = logging.makeLogRecord({"msg": "\ud800 line"})
    for _ in range(MAX_PER_SECOND + 5):
        log.handle(record)
    assert Log.num_dropped - before == 5
    for _ in range(MAX_WAITING):  # Nobody reads, so a part of them has no room.
        now += 1
        log.handle(record)
    dropped = Log.num_dropped - before
    assert 5 < dropped < 5 + 2 * MAX_PER_SECOND
    with open(pipe[0], closefd=False) as file:
        lines = (line for line in file if line != "\n")
        first = [next(lines) for _ in range(MAX_PER_SECOND + 1)]
        assert first[:-1] == ["weft openai: \\ud800 line\n"] * MAX_PER_SECOND
        assert first[-1] == "weft openai: 5 lines of the log were dropped\n"
        now += 1
        log.handle(record)
        rest = f"weft openai: {dropped - 5} lines of the log were dropped\n"
        assert rest in lines


@pytest.fixture
def waiting(monkeypatch: Patch) -> Iterator[tuple[SmallServer, str]]:
    """A server whose streams wait for `begin`, and the URL of a front."""
    monkeypatch.setattr(app_module, "STATUS_SECONDS", 0.2)
    monkeypatch.setattr(app_module, "COMMENT_SECONDS", 0.05)
    with SmallServer() as server:
        server.begin.clear()
        tokenizer = ModelTokenizer(Bytes())  # type: ignore[arg-type]
        with running(Front(server.target, tokenizer, Security())) as (port, _):
            yield server, f"http://127.0.0.1:{port}/v1/completions"


BODY = {"model": "toy", "prompt": [5], "stream": True}


def test_a_stream_that_waits_is_not_silent(waiting: tuple[SmallServer, str]) -> None:
    server, url = waiting
    with httpx.stream("POST", url, json=BODY, timeout=20) as reply:
        assert reply.status_code == 200  # Its head is there before its first token.
        lines = filter(None, reply.iter_lines())
        assert [next(lines) for _ in range(3)] == [": waiting"] * 3
        server.begin.set()
        server.finish.set()
        rest = [line for line in lines if line != ": waiting"]
    assert '"text": "A"' in rest[0] and rest[-1] == "data: [DONE]"
    counted = httpx.get(url.replace("v1/completions", "metrics")).text
    path = 'path="/v1/completions",status="200"'
    assert f"weft_openai_requests_total{{{path}}} 1" in counted
    assert 'answer_seconds_bucket{le="0.1"} 0' in counted  # It began with the token.


def test_a_refusal_of_a_stream_has_a_status_unless_it_comes_late(
    waiting: tuple[SmallServer, str],
) -> None:
    server, url = waiting
    server.refusal = grpc.StatusCode.INVALID_ARGUMENT, "no such token"
    with httpx.stream("POST", url, json=BODY, timeout=20) as reply:
        assert reply.status_code == 200
        server.begin.set()
        events = [line for line in reply.iter_lines() if line.startswith("data: ")]
    (error,) = (json.loads(event.removeprefix("data: ")) for event in events)
    assert error["error"]["type"] == "invalid_request_error"
    assert "no such token" in error["error"]["message"]
    assert httpx.post(url, json=BODY, timeout=20).status_code == 400


def test_a_client_that_leaves_a_stream_that_waits_ends_its_call(
    waiting: tuple[SmallServer, str],
) -> None:
    server, url = waiting
    with httpx.stream("POST", url, json=BODY, timeout=20) as reply:
        next(reply.iter_lines())
    page = url.replace("v1/completions", "metrics")
    wait_until(lambda: "requests_open 0" in httpx.get(page).text)
    assert server.named("SampleStream")
