"""Tests whose requests the front for OpenAI's API takes, and when it lets go of them:
hosts, pages, keys, names, slow requests, health and stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import h11
import httpx
import pytest
from conftest import Logs, Patch, closed_port, wait_until
from fastapi.testclient import TestClient
from fronts import Bytes, byte_level, front_of, running
from small_server import SmallServer
from starlette.datastructures import Headers
from starlette.types import Message

from weft.aio import AsyncClient
from weft.channel import Security
from weft.data import ModelTokenizer
from weft.errors import InvalidArgument
from weft.openai_front import app as app_module
from weft.openai_front import hosts, intake
from weft.openai_front import server as server_module
from weft.openai_front.app import Front, make_app


@pytest.fixture
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(Bytes())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "allowed", "served"),
    [
        ("localhost", [], True),
        ("LOCALHOST:8000", [], True),
        ("a.localhost:8000", [], True),
        ("127.0.0.1:8000", [], True),
        ("10.1.2.3", [], True),
        ("[::1]:8000", [], True),
        ("evil.example", [], False),
        ("evil.example:8000", ["weft.example"], False),
        ("weft.example:8000", ["weft.example"], True),
        ("Weft.Example.", ["weft.example"], True),
        ("a.weft.example", ["weft.example"], False),
        ("localhost.evil.example", [], False),
        ("notlocalhost", [], False),
        ("127.0.0.1.evil.example", [], False),
        ("127.1", [], False),
        ("localhost:x", [], False),
        ("localhost@evil.example", [], False),
        ("", [], False),
    ],
)
def test_hosts_that_are_served(host: str, allowed: list[str], served: bool) -> None:
    assert hosts.serves_host(host, allowed) == served


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("http://localhost", "localhost:80", True),
        ("https://Weft.example", "weft.example:443", True),
        ("https://weft.example:443", "weft.example", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://localhost:3000", "localhost:8000", False),
        ("http://localhost", "localhost:443", False),
        ("https://evil.example", "weft.example", False),
        ("null", "null", False),
        ("file://", "", False),
    ],
)
def test_origins_of_a_host(origin: str, host: str, same: bool) -> None:
    assert hosts.is_same_origin(origin, host) == same


def status_of(*pairs: tuple[str, str]) -> int:
    raw = [(name.encode(), value.encode()) for name, value in pairs]
    refusal = hosts.check(Headers(raw=raw), ["weft.example"], ["https://chat.example"])
    return 200 if refusal is None else refusal.status


def test_a_request_has_one_host_and_no_foreign_page() -> None:
    host, page = ("host", "weft.example"), ("origin", "https://weft.example")
    assert status_of() == status_of(host, host) == 400
    assert status_of(("host", "evil.example")) == 421
    assert status_of(host) == status_of(host, page) == 200
    assert status_of(host, ("origin", "https://chat.example")) == 200
    assert status_of(host, ("origin", "https://evil.example")) == 403
    assert status_of(host, page, ("origin", "https://evil.example")) == 403
    inner = ("host", "127.0.0.1:8000")
    assert status_of(inner, page) == 403
    assert status_of(inner, page, ("x-forwarded-host", "weft.example, a")) == 200
    assert status_of(("host", "evil.example"), ("x-forwarded-host", "localhost")) == 421


class Counting(Bytes):
    """Counts the texts that it turns into tokens, one for each character."""

    texts = 0

    def encode(self, text: str, **_: Any) -> Any:
        self.texts += 1
        ids = [ord(character) for character in text]
        return SimpleNamespace(ids=ids, special_tokens_mask=[0] * len(ids))


def counting() -> tuple[Counting, ModelTokenizer]:
    counted = Counting()
    tokenizer = ModelTokenizer(counted)  # type: ignore[arg-type]
    counted.texts = 0  # The tokenizer looks at one text when it is made.
    return counted, tokenizer


def test_foreign_hosts_and_pages_get_no_answer(tokenizer: ModelTokenizer) -> None:
    with SmallServer() as server, front_of(server.target, tokenizer) as front:
        for headers, status in (
            ({"Host": "evil.example"}, 421),
            ({"Origin": "https://evil.example"}, 403),
        ):
            for path in ("/health", "/v1/models", "/v1/completions"):
                for method in ("GET", "POST", "OPTIONS"):
                    refused = front.request(method, path, headers=headers)
                    assert refused.status_code == status
                    error = refused.json()["error"]
                    assert error["type"] == "invalid_request_error"
                    assert "evil.example" in error["message"]
        assert server.calls == []
        assert front.get("/v1/models/toy").status_code == 200


def test_pages_of_an_allowed_origin_may_call(tokenizer: ModelTokenizer) -> None:
    page = {"Origin": "https://chat.example"}
    asks = {
        **page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, x-stainless-os",
    }
    with SmallServer(token="weft_good") as server:
        names = ["https://chat.example"]
        with front_of(server.target, tokenizer, allowed_origins=names) as front:
            preflight = front.options("/v1/chat/completions", headers=asks)
            assert preflight.status_code == 200
            allowed = preflight.headers["access-control-allow-headers"]
            assert "x-stainless-os" in allowed and "authorization" in allowed
            key = {**page, "Authorization": "Bearer weft_good"}
            for headers, status in ((page, 401), (key, 200)):
                reply = front.post("/v1/completions", headers=headers, json=BODY)
                assert reply.status_code == status
                found = reply.headers["access-control-allow-origin"]
                assert found == "https://chat.example"
                assert "x-request-id" in reply.headers["access-control-expose-headers"]
            evil = {**asks, "Origin": "https://evil.example"}
            assert front.options("/v1/models", headers=evil).status_code == 403


BODY = {"model": "toy", "prompt": [5], "max_tokens": 1}
GOOD = {"Authorization": "Bearer weft_good"}


def test_a_key_is_checked_before_the_body_is_read() -> None:
    counted, tokenizer = counting()
    read: list[int] = []

    with SmallServer(token="weft_good") as server:
        front = Front(server.target, tokenizer, Security())
        app = make_app(front, 9999)

        async def refused(key: str) -> list[Message]:
            sent: list[Message] = []

            async def receive() -> Message:
                read.append(1)
                return {"type": "http.request", "body": b"", "more_body": True}

            async def send(message: Message) -> None:
                sent.append(message)

            scope = {
                "type": "http",
                "method": "POST",
                "path": "/v1/completions",
                "query_string": b"",
                "headers": [(b"host", b"localhost"), (b"authorization", key.encode())],
            }
            await app(scope, receive, send)
            return sent

        async def main() -> None:
            for key in ("", "Bearer weft_bad", "Bearer weft_b\u00e4d", "Bearer sk-1"):
                start, _ = await refused(key)
                assert start["status"] == 401
            await front.close()

        asyncio.run(main())
        assert read == [] and counted.texts == 0

        with front_of(server.target, tokenizer) as served:
            for _ in range(5):
                body = {**BODY, "prompt": "ab"}
                reply = served.post("/v1/completions", headers=GOOD, json=body)
                assert reply.status_code == 200, reply.text
        assert counted.texts == 5
        good = [m for m in server.named("GetInfo") if "weft_good" in str(m)]
        assert len(good) <= 2  # A good key is remembered for a while.


def test_a_revoked_key_is_soon_refused(
    tokenizer: ModelTokenizer, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(app_module, "INFO_SECONDS", 0.05)
    with (
        SmallServer(token="weft_good") as server,
        front_of(server.target, tokenizer) as front,
    ):
        assert front.post("/v1/completions", headers=GOOD, json=BODY).is_success
        server.token = "weft_other"
        time.sleep(0.1)
        refused = front.post("/v1/completions", headers=GOOD, json=BODY)
        assert refused.status_code == 401
        assert len(server.named("Sample")) == 1  # The front itself has refused.
        server.token = "weft_good"
        assert front.post("/v1/completions", headers=GOOD, json=BODY).is_success


def test_wrong_keys_take_no_places(tokenizer: ModelTokenizer) -> None:
    with SmallServer(token="weft_good") as server:
        front = Front(server.target, tokenizer, Security())
        with TestClient(make_app(front, 9), base_url="http://localhost") as client:
            for number in range(3):
                wrong = {"Authorization": f"Bearer weft_{number}"}
                assert client.post("/v1/no", headers=wrong).status_code == 401
        assert len(front._callers) == 0


def test_other_requests_go_on_while_a_long_text_is_tokenized() -> None:
    tokenizer = ModelTokenizer(byte_level())
    text = "hello world " * 50_000

    async def longest_gap() -> float:
        work = asyncio.ensure_future(asyncio.to_thread(tokenizer.encode, text))
        gaps = [0.0]
        while not work.done():
            before = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - before)
        assert len(work.result()) == len(text)
        return max(gaps)

    start = time.monotonic()
    gap = asyncio.run(longest_gap())
    # `encode` of the package tokenizers would hold Python's lock nearly all the time.
    assert gap < (time.monotonic() - start) / 2


def test_a_long_text_has_the_tokens_of_its_parts() -> None:
    tokenizer = ModelTokenizer(byte_level())
    text = "hello wörld " * 2000
    assert tokenizer.encode(text) == tokenizer.encode("hello wörld ") * 2000
    with pytest.raises(InvalidArgument, match="not a text"):
        tokenizer.encode("\ud800" * 20_000)


@pytest.mark.parametrize(
    "model", ["a" * 9000, "mine@" + "a" * 9000, "a" * 129, "mine@a.", "mi ne", "ä"]
)
def test_a_name_that_no_model_can_have_is_not_found(
    tokenizer: ModelTokenizer, model: str
) -> None:
    with SmallServer() as server, front_of(server.target, tokenizer, 20_000) as front:
        for stream in (False, True):
            body = {"model": model, "prompt": [5], "stream": stream}
            refused = front.post("/v1/completions", json=body)
            assert refused.status_code == 404 and len(refused.text) < 600
            assert refused.json()["error"]["code"] == "model_not_found"
        called = {name for name, _ in server.calls}
        assert called <= {"GetInfo", "GetAdapter"}
        assert all(len(str(metadata)) < 1000 for _, metadata in server.calls)


def test_a_server_may_start_again_with_another_model(tokenizer: ModelTokenizer) -> None:
    def ask(model: str) -> int:
        body = {"model": model, "prompt": [5], "max_tokens": 1}
        return front.post("/v1/completions", json=body).status_code

    with SmallServer() as server, front_of(server.target, tokenizer) as front:
        assert ask("toy") == ask("mine") == 200
        server.model = "toy-v2"
        assert front.get("/v1/models/toy-v2").status_code == 200
        assert ask("toy-v2") == 200
        assert ask("toy") == front.get("/v1/models/toy").status_code == 404


def test_each_answer_names_its_request(tokenizer: ModelTokenizer) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    parent = f"00-{trace}-b7ad6b7169203331-01"
    body = {"model": "mine", "prompt": [5], "max_tokens": 1}

    def ask(**headers: str) -> str:
        """Returns the id in the answer, and checks those in the server's calls."""
        server.calls.clear()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        reply = front.post("/v1/completions", json=body, headers=named)
        assert reply.status_code == 200
        name = reply.headers["x-request-id"]
        sampled = server.named("Sample") + server.named("GetAdapter")
        assert [m["x-request-id"] for m in sampled] == [name] * 2
        assert all(m.get("traceparent") == headers.get("traceparent") for m in sampled)
        return name

    with SmallServer() as server, front_of(server.target, tokenizer) as front:
        assert ask(x_request_id="job-7.a_b") == "job-7.a_b"
        assert ask(traceparent=parent) == trace
        assert ask(traceparent=parent, x_request_id="b") == "b"
        made = {ask(), ask(x_request_id="a b"), ask(x_request_id="a" * 65)}
        assert len(made) == 3 and all(re.fullmatch("[0-9a-f]{32}", m) for m in made)
        for path in ("/health", "/v1/models", "/v1/no"):
            assert front.get(path).headers["x-request-id"]
        evil = front.get("/health", headers={"Host": "evil.example"})
        assert evil.headers["x-request-id"]


def test_a_server_that_stops_answering_is_soon_a_503(
    tokenizer: ModelTokenizer, monkeypatch: Patch
) -> None:
    async def slow(*_: object) -> ModelTokenizer:
        await asyncio.sleep(60)
        return tokenizer

    def hang(_: bytes) -> bytes:
        server.finish.wait(60)
        return b""

    def check(name: str) -> None:
        start = time.monotonic()
        reply = front.post("/v1/completions", json={**BODY, "model": name})
        assert reply.status_code == 503 and "has not answered for" in reply.text
        assert time.monotonic() - start < 2

    with SmallServer() as server, front_of(server.target, tokenizer) as front:
        monkeypatch.setattr(server, "_adapter", hang)
        check("mine")
    monkeypatch.setattr(AsyncClient, "tokenizer", slow)
    monkeypatch.setattr(app_module, "TOKENIZER_SECONDS", 0.5)
    with (
        SmallServer() as server,
        front_of(server.target, tokenizer) as front,
        ThreadPoolExecutor() as pool,
    ):
        # The second caller does not wait for the first one's tokenizer, and then
        # for its own.
        list(pool.map(check, ["toy", "toy"]))


def test_health_needs_no_key(tokenizer: ModelTokenizer) -> None:
    with SmallServer() as server, front_of(server.target, tokenizer) as front:
        assert front.get("/health").status_code == 200
    with (
        SmallServer(token="weft_good") as server,
        front_of(server.target, tokenizer) as front,
    ):
        assert front.get("/health").status_code == 200
        assert front.get("/health", headers=GOOD).status_code == 200
    with closed_port() as closed, front_of(closed, tokenizer) as front:
        assert front.get("/health").status_code == 503


def speak(port: int, text: str) -> bytes:
    """Sends the text, and returns what the server sends until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(text.encode())
        parts = iter(lambda: connection.recv(65536), b"")
        return b"".join(parts)


HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def test_slow_requests_end(tokenizer: ModelTokenizer, monkeypatch: Patch) -> None:
    limits = {h11.IDLE: 0.3, h11.SEND_BODY: 0.6}
    monkeypatch.setattr(server_module, "_LIMITS", limits)
    monkeypatch.setattr(intake, "BODY_SECONDS", 0.3)
    half = HEAD + "Content-Length: 10\r\n\r\n{"
    with SmallServer(token="weft_good") as server:
        front = Front(server.target, tokenizer, Security())
        with running(front) as (port, _):
            for text in ("", "POST /v1", HEAD + "Author"):
                with contextlib.suppress(ConnectionResetError):
                    assert speak(port, text) == b""
            good = half.replace("\r\n", "\r\nAuthorization: Bearer weft_good\r\n", 1)
            late = speak(port, good)
            assert late.startswith(b"HTTP/1.1 408") and b"not arrived after" in late
            with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
                stranger.sendall(half.encode())
                assert stranger.recv(65536).startswith(b"HTTP/1.1 401")
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(65536):
                        pass


def test_a_slow_answer_is_no_slow_request(
    tokenizer: ModelTokenizer, monkeypatch: Patch
) -> None:
    limits = {h11.IDLE: 0.2, h11.SEND_BODY: 0.2}
    monkeypatch.setattr(server_module, "_LIMITS", limits)
    with SmallServer() as server:
        front = Front(server.target, tokenizer, Security())
        with running(front) as (port, _), httpx.Client() as http:
            url = f"http://127.0.0.1:{port}/v1/completions"
            body = {**BODY, "stream": True}
            with http.stream("POST", url, json=body, timeout=20) as reply:
                time.sleep(0.6)
                server.finish.set()
                assert "[DONE]" in "".join(reply.iter_text())


def test_the_end_of_the_front_ends_its_streams(tokenizer: ModelTokenizer) -> None:
    body = json.dumps({**BODY, "stream": True})
    with SmallServer() as server:
        front = Front(server.target, tokenizer, Security())
        with running(front) as (port, http):
            head = (
                HEAD + f"Content-Type: application/json\r\nContent-Length: {len(body)}"
            )
            with ThreadPoolExecutor(1) as pool:
                said = pool.submit(speak, port, head + "\r\n\r\n" + body)
                wait_until(lambda: bool(server.named("SampleStream")))
                time.sleep(0.2)
                http.should_exit = True
                events = said.result(20).decode().split("data: ")
            assert '"text": "A"' in events[1]
            assert "the front stops" in events[-1] and '"error"' in events[-1]


def test_a_server_that_is_gone_or_hangs_is_503_within_two_seconds(
    tokenizer: ModelTokenizer,
) -> None:
    with (
        closed_port() as closed,
        socket.create_server(("127.0.0.1", 0)) as silent,  # It accepts nothing.
    ):
        hangs = f"127.0.0.1:{silent.getsockname()[1]}"
        for target in (closed, hangs):
            with front_of(target, tokenizer) as front:
                start = time.monotonic()
                refused = front.post("/v1/completions", json=BODY)
                assert time.monotonic() - start < 2
                assert refused.status_code == 503, refused.text
                start = time.monotonic()
                assert front.get("/health").status_code == 503
                assert time.monotonic() - start < 2


def test_a_server_that_drains_is_503_at_once(tokenizer: ModelTokenizer) -> None:
    with SmallServer() as server, front_of(server.target, tokenizer) as front:
        server.draining = True
        refused = front.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert "is draining" in refused.text and refused.headers["Retry-After"] == "1"


def test_metrics_count_requests_and_name_no_model(tokenizer: ModelTokenizer) -> None:
    with SmallServer() as server, front_of(server.target, tokenizer) as front:
        assert front.post("/v1/completions", json=BODY).is_success
        assert front.get("/v1/models/secret").status_code == 404
        page = front.get("/metrics")
    assert page.headers["Content-Type"].startswith("text/plain")
    lines = page.text.splitlines()
    counted = 'weft_openai_requests_total{path="/v1/completions",status="200"} 1'
    assert counted in lines
    assert 'weft_openai_requests_total{path="other",status="404"} 1' in lines
    assert 'weft_openai_answer_seconds_bucket{le="+Inf"} 2' in lines
    assert "weft_openai_requests_open 0" in lines
    assert "secret" not in page.text


def test_the_front_says_where_it_listens(
    tokenizer: ModelTokenizer, caplog: Logs
) -> None:
    async def main() -> None:
        app = make_app(Front("127.0.0.1:1", tokenizer, Security()), 9)
        settings = server_module.config(app, "127.0.0.1", 0)
        server = server_module.Server(settings, "127.0.0.1:1")
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        server.should_exit = True
        await serving

    asyncio.run(main())
    line = r"base URL http://127\.0\.0\.1:[1-9]\d*/v1, for weftd at 127"
    assert re.match(line, caplog.messages[0])
