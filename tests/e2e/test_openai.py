"""Tests the front for OpenAI's API with the unmodified `openai` client: models by
name, whole and streamed answers, scores, and bad requests."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import daemon as daemon_module
import numpy as np
import openai
import pytest
from conftest import fixtures
from fastapi.testclient import TestClient
from fronts import byte_level
from models import tiny_model

import weft
from weft.channel import Security
from weft.data import ModelTokenizer
from weft.openai_front.app import MAX_CLIENTS, make_app
from weft.openai_front.app import Front as InProcess

SMOLLM2 = fixtures.SHORT_SMOLLM2
SECRET = " The password of the lighthouse is violet thunder."
QUESTION = [{"role": "user", "content": "Name a colour."}]
DRAWN = "weft_sampled_tokens_total"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


class Front:
    """`python -m weft openai` beside a daemon."""

    def __init__(self, server: str) -> None:
        self.port = daemon_module.free_port()
        command = [sys.executable, "-m", "weft", "openai", "--server", server]
        command += ["--listen", f"127.0.0.1:{self.port}", "--max-body-bytes", "100000"]
        self._process = subprocess.Popen(command, env=os.environ.copy())
        for _ in range(600):
            assert self._process.poll() is None, "the front has ended"
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError("the front does not serve")

    def ask(
        self, method: str, path: str, body: bytes = b"", key: str = ""
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": "application/json"}
        headers["Authorization"] = f"Bearer {key}"
        connection.request(method, path, body or None, headers)
        reply = connection.getresponse()
        read = reply.read()
        connection.close()
        return reply.status, json.loads(read) if read else None

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="any", max_retries=0
        )

    def stop(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(60)


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.from_folder(fixtures.model_folder(SMOLLM2))


@pytest.fixture(scope="module")
def adapter(daemon_for: Any, tokenizer: ModelTokenizer) -> Iterator[weft.Adapter]:
    """An adapter that has learned a sentence, and its untrained snapshot."""
    with daemon_for(SMOLLM2).client() as client:
        adapter = client.create_adapter("keeper", rank=8, seed=1)
        adapter.snapshot("untrained")
        datum = weft.Datum.next_token(tokenizer.encode(SECRET))
        for _ in range(15):
            adapter.forward_backward([datum])
            adapter.optim_step(learning_rate=3e-3)
        yield adapter
        adapter.delete()


@pytest.fixture(scope="module")
def front(daemon_for: Any, adapter: weft.Adapter) -> Iterator[Front]:
    running = Front(daemon_for(SMOLLM2).address)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(front: Front) -> openai.OpenAI:
    return front.client()


@pytest.fixture(scope="module")
def base(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models_have_names(client: openai.OpenAI, base: str) -> None:
    names = {model.id for model in client.models.list()}
    assert base in names
    # Other tests may have left adapters on the daemon.
    kept = {name for name in names if name.startswith("keeper")}
    assert kept == {"keeper", "keeper@untrained"}
    assert client.models.retrieve("keeper@untrained").owned_by == "weft"
    for name in ("keeper@gone", "keeper@", "nobody", "no/body", "@gone"):
        with pytest.raises(openai.NotFoundError, match=name):
            client.models.retrieve(name)
        with pytest.raises(openai.NotFoundError, match=name):
            client.completions.create(model=name, prompt="a")
        with pytest.raises(openai.NotFoundError, match=name):
            client.completions.create(model=name, prompt="a", stream=True)


def test_an_adapter_completes_what_it_has_learned(
    client: openai.OpenAI, base: str
) -> None:
    prompt = " The password of the lighthouse is"
    texts = {
        name: client.completions.create(model=name, prompt=prompt, **GREEDY)
        .choices[0]
        .text
        for name in (base, "keeper", "keeper@untrained")
    }
    assert "violet thunder" in texts["keeper"]
    # An untrained adapter does not change the base model's text.
    assert texts["keeper@untrained"] == texts[base] != texts["keeper"]


@pytest.mark.parametrize("stop", [None, "thunder", [" thunder.", "zzz"]])
def test_completions_are_equal_whole_and_streamed(
    client: openai.OpenAI, stop: Any
) -> None:
    call: dict[str, Any] = {
        "model": "keeper",
        "prompt": [" The password of", "Once upon a time 🦊"],
        "n": 2,
        "seed": 7,
        "temperature": 0.9,
        "max_tokens": 24,
        "stop": stop,
        "logprobs": 2,
        # With few tokens to draw from, rounding errors do not change a draw.
        "extra_body": {"top_k": 8},
    }
    whole: Any = client.completions.create(**call)
    texts, reasons = [""] * 4, [""] * 4
    logprobs: list[list[float]] = [[] for _ in range(4)]
    offsets: list[list[int]] = [[] for _ in range(4)]
    usage: Any = None
    for event in client.completions.create(
        **call, stream=True, stream_options={"include_usage": True}
    ):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs:
                logprobs[choice.index] += choice.logprobs.token_logprobs
                offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    assert usage == whole.usage and usage.completion_tokens > 0
    for streamed, choice in zip(logprobs, whole.choices, strict=True):
        assert np.allclose(streamed, choice.logprobs.token_logprobs, atol=1e-4)
        assert all(len(top) >= 1 for top in choice.logprobs.top_logprobs)
    stops = [stop] if isinstance(stop, str) else stop or []
    assert not any(stop in text for stop in stops for text in texts)


def test_chats_are_equal_whole_and_streamed(client: openai.OpenAI, base: str) -> None:
    call: dict[str, Any] = {"model": base, "messages": QUESTION, "n": 2, "seed": 3}
    call |= {"max_completion_tokens": 16, "logprobs": True, "top_logprobs": 2}
    call["extra_body"] = {"top_k": 8}
    whole: Any = client.chat.completions.create(**call)
    texts = [""] * 2
    for event in client.chat.completions.create(**call, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    for choice in whole.choices:
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 2
            assert bytes(entry.bytes).decode() == entry.token


class Guarded:
    """A small daemon that requires tokens, with a front in this process. `keys` has a
    token for each scope."""

    def __init__(self, daemon: Any, front: TestClient, keys: dict[str, str]) -> None:
        self.daemon = daemon
        self.front = front
        self.keys = keys
        headers = {"Authorization": f"Bearer {keys['read']}"}
        models = front.get("/v1/models", headers=headers).json()["data"]
        self.base = models[0]["id"]

    def ask(self, key: str, **fields: Any) -> Any:
        body = {"model": self.base, "prompt": [5, 6], "max_tokens": 2, **fields}
        headers = {"Authorization": f"Bearer {self.keys.get(key, key)}"}
        return self.front.post("/v1/completions", json=body, headers=headers)

    def client(self, key: str) -> Any:
        return self.daemon.client(security=Security(token=self.keys[key]))

    def calls(self) -> dict[str, float]:
        """Returns how often each method of the server was called."""
        pattern = r'^grpc_server_handled_total\{.*grpc_method="(\w+)".* (\S+)$'
        found: dict[str, float] = {}
        for method, count in re.findall(pattern, self.daemon.scrape(), re.MULTILINE):
            found[method] = found.get(method, 0.0) + float(count)
        return found


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    tokenizer = ModelTokenizer(byte_level())  # It has no more tokens than the model.
    folder = tmp_path_factory.mktemp("weftd-guarded")
    keys = {}
    weftctl = daemon_module.BUILD_DIR / "client" / "weftctl" / "weftctl"
    for scope in ("admin", "train", "sample", "read"):
        command = [str(weftctl), "token", "create", scope, "--tenant", "acme"]
        command += ["--scopes", scope, "--file", str(folder / "tokens")]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
        keys[scope] = re.findall(r"weft_\S+", made.stdout)[0]
    keys["unknown"] = keys["read"][:-4] + "0000"
    flags = ("--auth-tokens-file", str(folder / "tokens"))
    with daemon_module.running(tiny_model("llama-tied"), folder, *flags) as daemon:
        app = make_app(InProcess(daemon.address, tokenizer, Security()), 10_000)
        with TestClient(app, base_url="http://localhost") as front:
            yield Guarded(daemon, front, keys)


def test_a_request_lists_no_adapters(guarded: Guarded) -> None:
    """Counts the server's calls for each kind of model name."""
    with guarded.client("train") as owner:
        owner.create_adapter("mine", rank=4).snapshot("kept")
    assert guarded.ask("sample").status_code == 200  # The front fetches server info.
    for name, handles in ((guarded.base, 0), ("mine", 1), ("mine@kept", 1)):
        before = guarded.calls()
        assert guarded.ask("sample", model=name).status_code == 200
        moved = {m: n - before.get(m, 0.0) for m, n in guarded.calls().items()}
        assert moved.pop("Sample") == 1.0, name
        assert moved.pop("GetAdapter", 0.0) == handles, name
        assert moved.pop("GetInfo", 0.0) <= 1.0, name  # It checks the key at times.
        assert not any(moved.values()), moved


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_server_have_their_status(
    guarded: Guarded, stream: bool
) -> None:
    assert guarded.ask("sample", stream=stream).status_code == 200
    for key in ("", "unknown", "sk-other"):
        refused = guarded.ask(key, stream=stream)
        assert refused.status_code == 401, refused.text
        assert refused.json()["error"]["type"] == "authentication_error"
    refused = guarded.ask("read", stream=stream)
    assert refused.status_code == 403, refused.text
    assert refused.json()["error"]["type"] == "permission_error"


def test_a_stream_does_not_wait_for_a_server_that_drains(guarded: Guarded) -> None:
    assert guarded.ask("sample").status_code == 200
    with guarded.client("admin") as admin:
        admin.drain()
    refused = guarded.ask("sample", stream=True)
    assert refused.status_code == 503, refused.text
    assert int(refused.headers["Retry-After"]) >= 1
    assert "drain" in refused.json()["error"]["message"]


def test_scores_of_a_prompt_are_the_samplers(
    client: openai.OpenAI,
    adapter: weft.Adapter,
    tokenizer: ModelTokenizer,
    daemon_for: Any,
) -> None:
    """Evaluation harnesses ask for the prompt's scores and for no new tokens."""
    tokens = tokenizer.encode(SECRET)
    before = drawn(daemon_for(SMOLLM2))
    reply: Any = client.completions.create(
        model="keeper", prompt=tokens, max_tokens=0, echo=True, logprobs=1
    )
    assert drawn(daemon_for(SMOLLM2)) == before + 1  # weftd draws at least one token.
    choice = reply.choices[0]
    assert choice.text == SECRET
    scores = choice.logprobs.token_logprobs
    assert scores[0] is None and choice.logprobs.top_logprobs[0] is None
    assert np.allclose(scores[1:], adapter.compute_logprobs(tokens)[1:], atol=1e-4)
    best = [max(top.values()) for top in choice.logprobs.top_logprobs[1:]]
    assert all(b >= s - 1e-4 for b, s in zip(best, scores[1:], strict=True))
    # The adapter has learned the sentence, so most of its tokens have the best score.
    assert sum(np.isclose(best, scores[1:], atol=1e-4)) >= len(best) - 3
    # Harnesses check whether a token's score is exactly equal to the best score.
    assert sum(b == s for b, s in zip(best, scores[1:], strict=True)) >= len(best) - 3
    assert reply.usage.completion_tokens == 0


def test_options_change_what_is_drawn(
    client: openai.OpenAI, tokenizer: ModelTokenizer
) -> None:
    yes, no = tokenizer.encode("yes")[0], tokenizer.encode("no")[0]

    def drawn(**options: Any) -> str:
        more = {k: options.pop(k) for k in ("allowed_token_ids", "min_tokens", "min_p")}
        reply = client.completions.create(
            model="keeper", prompt="Well,", seed=3, extra_body=more, **options
        )
        return str(reply.choices[0].text)

    texts = {t: tokenizer.decode([t]) for t in (yes, no)}
    both: dict[str, Any] = {
        "allowed_token_ids": [yes, no],
        "min_tokens": 6,
        "min_p": 0.0,
        "max_tokens": 6,
        "stop": texts[no],
    }
    assert drawn(**both, logit_bias={str(yes): 100}) == texts[yes] * 6
    assert drawn(**both, logit_bias={str(no): 100}) == texts[no] * 6
    # With min_p 1, only the likeliest token is drawn, and a penalty of 2 for each
    # draw in the end makes it the other one.
    text = drawn(
        **{**both, "min_p": 1.0, "max_tokens": 24, "min_tokens": 24},
        frequency_penalty=2.0,
        presence_penalty=2.0,
        temperature=0.5,
    )
    assert texts[yes] in text and texts[no] in text


BAD = [
    ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot'"),
    ({"prompt": "a", "n": 0}, "n is 0"),
    ({"prompt": "a", "frequency_penalty": 3}, "frequency_penalty is 3, must be in"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias['x'] is not the id"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "bias is 101, must be in [-100, 100]"),
    ({"prompt": "a", "min_p": 2}, "min_p is 2, must be in [0, 1]"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
    ({"prompt": "a", "magic": 1}, "magic is not known"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": [5, 10**6]}, "prompt"),
    ({"prompt": []}, "prompt has no tokens"),
    ({"prompt": 5}, "prompt is 5"),
]


@pytest.mark.parametrize(("fields", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_requests_name_the_field(front: Front, fields: Any, words: str) -> None:
    body = json.dumps({"model": "keeper", **fields}).encode()
    for stream in (b"", b', "stream": true'):
        asked = body[:-1] + stream + b"}"
        status, reply = front.ask("POST", "/v1/completions", asked)
        assert status == 400, reply
        assert words in reply["error"]["message"], reply


def test_what_is_no_request_is_refused(front: Front) -> None:
    for body, status in ((b"{", 400), (b"[]", 400), (b"\xff\xfe", 400)):
        assert front.ask("POST", "/v1/chat/completions", body)[0] == status
    large = b'{"prompt": "' + b"a" * 200_000 + b'"}'
    assert front.ask("POST", "/v1/completions", large)[0] == 413
    for method, path, code in (("GET", "/v1/no", 404), ("DELETE", "/v1/models", 405)):
        status, reply = front.ask(method, path)
        assert status == code and path in reply["error"]["message"]
    no_chat = json.dumps({"model": "keeper", "messages": []}).encode()
    status, reply = front.ask("POST", "/v1/chat/completions", no_chat)
    assert status == 400 and reply["error"]["param"] == "messages"
    assert front.ask("GET", "/health")[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_sampling(
    daemon_for: Any, front: Front, stream: bool
) -> None:
    fields = {"model": "keeper", "prompt": "a", "n": 8, "max_tokens": 4000}
    body = json.dumps({**fields, "stop_token_ids": [], "stream": stream}).encode()
    daemon = daemon_for(SMOLLM2)
    before = drawn(daemon)
    with socket.create_connection(("127.0.0.1", front.port)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        connection.sendall(head.encode() + body)
        daemon_module.wait_until(lambda: drawn(daemon) > before)
    daemon_module.wait_until(lambda: rests(daemon))


def drawn(daemon: Any) -> float:
    """Returns how many tokens the daemon has drawn."""
    rows = daemon.scrape().splitlines()
    return sum(float(r.split()[-1]) for r in rows if r.startswith(DRAWN))


def rests(daemon: Any) -> bool:
    """Returns whether the daemon draws no tokens for half a second."""
    before = drawn(daemon)
    time.sleep(0.5)
    return drawn(daemon) == before


def test_fields_that_are_null_are_as_absent(client: openai.OpenAI, base: str) -> None:
    null = {"n": None, "stream": None, "echo": None, "stop": None}
    call: dict[str, Any] = {"model": base, "prompt": "a", **GREEDY}
    texts = [
        client.completions.create(**call, extra_body=extra).choices[0].text
        for extra in ({}, null)
    ]
    assert texts[0] == texts[1]


def test_keys_of_others_end_no_call(front: Front, base: str) -> None:
    fields = {"model": base, "prompt": "a", "max_tokens": 100, "temperature": 1.0}
    # Four answers take longer than all the calls below.
    body = json.dumps({**fields, "n": 4, "stop_token_ids": [], "seed": 5}).encode()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(front.ask, "POST", "/v1/completions", body)
        for number in range(MAX_CLIENTS + 1):
            front.ask("GET", "/v1/models", key=f"weft_{number}")
        assert not call.done()
        assert call.result(60)[0] == 200
