"""Clients of OpenAI's API beside the Tinker API: the unmodified `openai` client samples
from checkpoints of Tinker's clients, by their paths."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from raw_client import TOKENS, RawClient
from tinker_daemon import ROOT, TinkerDaemon

sys.path.append(str(ROOT / "tests" / "client"))

from fronts import byte_level, running

from weft.channel import Security
from weft.data import ModelTokenizer
from weft.data.chat import ChatTemplate
from weft.openai_front.app import Front
from weft.openai_front.tinker import TinkerPort

CHAT = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})


@pytest.fixture(scope="module")
def tinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerDaemon]:
    """A server whose cache holds less than its context."""
    folder = tmp_path_factory.mktemp("tinker-openai")
    flags = ("--model-alias", "hub/other", "--kv-cache-bytes", "40000")
    with TinkerDaemon(folder, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(tinker: TinkerDaemon) -> Iterator[openai.OpenAI]:
    port = TinkerPort(tinker.url.removeprefix("http://"))
    tokenizer = ModelTokenizer(byte_level(), template=CHAT)
    front = Front(tinker.server.address, tokenizer, Security(), port)
    with running(front) as (number, _):
        yield openai.OpenAI(
            base_url=f"http://127.0.0.1:{number}/oai/api/v1",
            api_key="tml-any",
            max_retries=0,
        )


def test_a_checkpoint_is_a_model_by_its_path(
    tinker: TinkerDaemon, client: openai.OpenAI
) -> None:
    raw = RawClient(tinker)
    model = raw.model(raw.session())
    raw.result(raw.train(model, 1))
    raw.result(raw.step(model, 2))
    made = raw.must("save_weights_for_sampler", model_id=model, seq_id=3, path="kept")
    path = raw.result(made)["path"]
    raw.result(raw.train(model, 4))
    raw.result(raw.step(model, 5))
    names = [entry.id for entry in client.models.list()]
    assert names == ["toy", "hub/other", path]

    def drawn(name: str) -> list[float]:
        sample = client.completions.create(
            model=name, prompt=TOKENS, max_tokens=8, temperature=0, logprobs=0
        )
        logprobs = sample.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None
        return [float(p) for p in logprobs.token_logprobs if p is not None]

    saved, latest = drawn(path), drawn(model.replace(":train:", ".train."))
    assert saved == drawn(path) and saved != latest
    base = drawn("toy")
    assert drawn("hub/other") == drawn("toy:peft:32") == base != saved
    # Both fronts draw from the same adapter.
    sampler = raw.sampler(raw.session(), 1, path)[1]["sampling_session_id"]
    own = raw.result(raw.sample(sampler, 1))["sequences"][0]["logprobs"]
    assert own == pytest.approx(saved[: len(own)])
    with pytest.raises(openai.NotFoundError):
        drawn(path + "x")


def test_a_sample_without_max_tokens_fits_the_cache(
    tinker: TinkerDaemon, client: openai.OpenAI
) -> None:
    chat: dict[str, Any] = {"model": "toy", "logit_bias": {"5": 100}}
    chat["messages"] = [{"role": "user", "content": "abc"}]
    for n in (1, 2):
        answer: Any = client.chat.completions.create(**chat, n=n)
        assert all(choice.finish_reason == "length" for choice in answer.choices)
        assert answer.usage.completion_tokens > 16 * n
    with pytest.raises(openai.BadRequestError, match="--kv-cache-bytes"):
        client.completions.create(model="toy", prompt=TOKENS, max_tokens=200)
    raw = RawClient(tinker)
    sampled = raw.must(
        "asample",
        base_model="toy",
        num_samples=1,
        prompt={"chunks": [{"type": "encoded_text", "tokens": TOKENS}]},
        sampling_params={"stop": []},
    )
    assert len(raw.result(sampled)["sequences"][0]["tokens"]) > 16
