"""Tests the names of models in the front for OpenAI's API, with the Tinker API beside
it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
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

    def _answer(self, status: int, body: object) -> None:
        self.keys.append(self.headers["X-API-Key"])
        text = json.dumps(body).encode()
        self.send_response(status)
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


def assert_missing(refused: Any) -> None:
    assert refused.status_code == 404, refused.text
    assert refused.json()["error"]["code"] == "model_not_found"


def test_names_of_the_tinker_api_are_models(
    tinker: str, tokenizer: ModelTokenizer
) -> None:
    with SmallServer() as server:
        front = Front(server.target, tokenizer, Security(), TinkerPort(tinker))
        with TestClient(make_app(front, 9999), base_url="http://localhost") as web:
            for model, adapter in (
                ("toy", ""),
                ("mine", "mine"),
                ("qwen/QWEN3-8B", ""),
                ("Qwen/Qwen3-8B:peft:4096", ""),
            ):
                reply = ask(web, model)
                assert reply.status_code == 200, reply.text
                assert reply.json()["model"] == model
                assert server.asked[-1].adapter_id == adapter
            for model in ("Qwen/Qwen3-8", "tinker://x", "tinker://x/toy"):
                assert_missing(ask(web, model))
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
                header = {"Authorization": f"Bearer {key}"}
                reply = ask(web, PATH, **header)
                assert reply.status_code == 200, reply.text
                assert web.get("/v1/models", headers=header).status_code == 200
                assert FakeTinker.keys[-1] == "tml-weft_secret"
            refused = ask(web, PATH, Authorization="Bearer sk-x")
            assert refused.status_code == 401
            assert "no token of this server" in refused.json()["error"]["message"]


def test_a_path_names_a_checkpoint(tokenizer: ModelTokenizer) -> None:
    """No server of the Tinker API is asked for it."""
    with SmallServer() as server:
        server.checkpoints = [("0" * 32 + ".train.0", "sampler_weights.kept")]
        with front_of(server.target, tokenizer) as web:
            for kind, prefix in (
                ("sampler_weights", "sampler_weights."),
                ("external_weights", "external_weights."),
                ("weights", ""),
            ):
                path = f"tinker://{RUN}/{kind}/a.b"
                reply = ask(web, path)
                assert reply.status_code == 200, reply.text
                assert reply.json()["model"] == path
                assert server.asked[-1].adapter_id == RUN.replace(":", ".")
                assert server.asked[-1].checkpoint == f"{prefix}a.b"
            # A copy is a run of another form.
            assert ask(web, PATH.replace(":train:0", "")).status_code == 200
            assert server.asked[-1].adapter_id == "0" * 32
            shown = web.get(f"/v1/models/{PATH}").json()
            assert (shown["id"], shown["created"]) == (PATH, 1)
            assert_missing(web.get(f"/v1/models/{PATH}x"))
            count = len(server.asked)
            for bad in ("other/a", "weights", "weights/a/b", "weights/"):
                assert_missing(ask(web, f"tinker://{RUN}/{bad}"))
            assert len(server.asked) == count
            server.refusal = (grpc.StatusCode.NOT_FOUND, "no such checkpoint")
            assert_missing(ask(web, PATH))


def test_a_front_outlives_the_tinker_api(tokenizer: ModelTokenizer) -> None:
    with SmallServer() as server, closed_port() as closed:
        front = Front(server.target, tokenizer, Security(), TinkerPort(closed))
        with TestClient(make_app(front, 9999), base_url="http://localhost") as web:
            refused = web.get("/v1/models")
            assert refused.status_code == 503 and refused.headers["Retry-After"]
            assert closed in refused.json()["error"]["message"]
            for model in ("toy", "toy:peft:1", PATH):
                assert ask(web, model).status_code == 200


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
    run = RUN.replace(":", ".")
    for model in (run, f"acme~{run}", f"log012{run[6:]}"):
        assert is_of_tinker(model)
    for model in ("mine", "abc.train.1", "tinker"):
        assert not is_of_tinker(model)
