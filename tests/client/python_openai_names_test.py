"""Tests the names of models in the front for OpenAI's API, with the Tinker API beside
it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from conftest import closed_port
from fastapi.testclient import TestClient
from fronts import byte_level, front_of
from small_server import SmallServer

from weft.channel import Security
from weft.data import ModelTokenizer
from weft.openai_front.app import Front, make_app
from weft.openai_front.names import is_base, is_of_tinker
from weft.openai_front.tinker import TinkerPort

RUN = "0" * 32 + ":train:0"
PATH = f"tinker://{RUN}/sampler_weights/kept"
FULL = f"tinker://{RUN}/sampler_weights/full"
MODELS = [{"model_name": "toy"}, {"model_name": "Qwen/Qwen3-8B"}]


class FakeTinker(BaseHTTPRequestHandler):
    """The answers of weftd's Tinker API. `keys` has the keys that it got."""

    keys: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        if self.path.endswith("/get_server_capabilities"):
            return self._answer(200, {"supported_models": MODELS})
        entry = {"tinker_path": PATH, "time": "2026-01-01T00:00:01.5+00:00"}
        kinds = [{**entry, "checkpoint_type": t} for t in ("training", "sampler")]
        return self._answer(200, {"checkpoints": kinds})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/api/v1/weft/lend_adapter"
        if asked == {"model_path": PATH}:
            return self._answer(200, {"adapter_id": "mine"})
        if asked == {"model_path": FULL}:
            return self._answer(429, {"detail": "no adapter is free"})
        return self._answer(404, {"detail": "there is no such checkpoint"})

    def _answer(self, status: int, body: object) -> None:
        self.keys.append(self.headers["X-API-Key"])
        text = json.dumps(body).encode()
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "1")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def tinker() -> Iterator[str]:
    """The address of a Tinker API."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeTinker)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(byte_level())


def ask(front: TestClient, model: str, **headers: str) -> Any:
    body = {"model": model, "prompt": [5], "max_tokens": 1}
    return front.post("/v1/completions", json=body, headers=headers)


def test_names_of_the_tinker_api_are_models(
    tinker: str, tokenizer: ModelTokenizer
) -> None:
    with SmallServer() as server:
        front = Front(server.target, tokenizer, Security(), TinkerPort(tinker))
        with TestClient(make_app(front, 9999), base_url="http://localhost") as web:
            for model, adapter in (
                ("toy", ""),
                ("mine", "mine"),
                (PATH, "mine"),
                ("qwen/QWEN3-8B", ""),
                ("Qwen/Qwen3-8B:peft:4096", ""),
            ):
                reply = ask(web, model)
                assert reply.status_code == 200, reply.text
                assert reply.json()["model"] == model
                assert server.asked[-1].adapter_id == adapter
            assert web.get(f"/v1/models/{PATH}").json()["id"] == PATH
            for model in ("Qwen/Qwen3-8", PATH + "x", "tinker://x"):
                refused = ask(web, model)
                assert refused.status_code == 404, refused.text
                assert refused.json()["error"]["code"] == "model_not_found"
            refused = ask(web, FULL)
            assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
            refused = ask(web, "Qwen/Qwen3-8B:peft:4097")
            assert refused.status_code == 400
            assert "must be in [1, 4096]" in refused.json()["error"]["message"]
            names = [entry["id"] for entry in web.get("/v1/models").json()["data"]]
            assert names == ["toy", "Qwen/Qwen3-8B", "mine", PATH]


def test_the_key_of_tinker_is_the_token(tinker: str, tokenizer: ModelTokenizer) -> None:
    with SmallServer(token="weft_secret") as server:
        front = Front(server.target, tokenizer, Security(), TinkerPort(tinker))
        with TestClient(make_app(front, 9999), base_url="http://localhost") as web:
            for key in ("weft_secret", "tml-weft_secret"):
                reply = ask(web, PATH, Authorization=f"Bearer {key}")
                assert reply.status_code == 200, reply.text
                assert FakeTinker.keys[-1] == "tml-weft_secret"
            refused = ask(web, PATH, Authorization="Bearer sk-x")
            assert refused.status_code == 401
            assert "no token of this server" in refused.json()["error"]["message"]


def test_without_the_tinker_api_a_path_is_refused_with_the_way(
    tokenizer: ModelTokenizer,
) -> None:
    with SmallServer() as server, closed_port() as closed:
        with front_of(server.target, tokenizer) as web:
            refused = ask(web, PATH)
            assert refused.status_code == 404
            assert "--tinker" in refused.json()["error"]["message"]
            assert ask(web, "toy:peft:1").status_code == 200
        front = Front(server.target, tokenizer, Security(), TinkerPort(closed))
        with TestClient(make_app(front, 9999), base_url="http://localhost") as web:
            refused = ask(web, PATH)
            assert refused.status_code == 503 and refused.headers["Retry-After"]
            assert closed in refused.json()["error"]["message"]
            assert ask(web, "toy").status_code == 200


@pytest.mark.parametrize("prefix", ["/v1", "/oai/api/v1"])
def test_both_prefixes_serve_all(prefix: str, tokenizer: ModelTokenizer) -> None:
    chat = {"model": "toy", "messages": [{"role": "user", "content": "a"}]}
    with SmallServer() as server, front_of(server.target, tokenizer) as web:
        assert "/chat/completions" in web.get(prefix).json()["paths"]
        assert web.get(f"{prefix}/models/mine").status_code == 200
        body = {"model": "toy", "prompt": "a"}
        assert web.post(f"{prefix}/completions", json=body).status_code == 200
        refused = web.post(f"{prefix}/chat/completions", json=chat)
        assert "no chat template" in refused.json()["error"]["message"]
        page = web.get("/metrics").text
    assert 'path="/v1/completions",status="200"} 1' in page


@pytest.mark.parametrize(
    ("model", "base"),
    [
        ("toy", True),
        ("hub/TOY", True),
        ("atoy", False),
        ("toy/x", False),
        ("toy:peft:9", True),
        ("", False),
    ],
)
def test_names_of_the_base_model(model: str, base: bool) -> None:
    assert is_base(model, ["toy"], 9) == base


def test_names_that_no_client_of_tinker_has_seen() -> None:
    for model in (RUN.replace(":", "."), "acme~tinker-sampler.1", "tinker-sampler.1"):
        assert is_of_tinker(model)
    for model in ("mine", "abc.train.1", "tinker"):
        assert not is_of_tinker(model)
