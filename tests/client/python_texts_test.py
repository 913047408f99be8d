"""Tests the server's tokenizer, and texts as prompts, samples and training data."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import WORDS, Patch
from fake_weftd import FakeWeftd
from fronts import front_of
from tokenizers import Tokenizer, models

import weft
from weft import peft_extras
from weft._proto import server_pb2
from weft.data import BadRecord, Dataset, Encoder, ModelTokenizer
from weft.openai_front import app
from weft.served_tokenizer import ServedTokenizer

QUESTION = [{"role": "user", "content": "w3"}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def texts(model_dir: Path) -> Iterator[FakeWeftd]:
    """A server whose model folder has a tokenizer."""
    with FakeWeftd(f"--model={model_dir}") as server:
        yield server


def words(*names: str) -> ModelTokenizer:
    return ModelTokenizer(
        Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, "end"))
    )


def sent_tokenizers(server: FakeWeftd) -> int:
    """Returns how often the server has sent its tokenizer."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as reply:
        page = reply.read().decode()
    found = re.search(r'grpc_server_started_total\{.*"GetTokenizer".*\} (\d+)', page)
    assert found
    return int(found[1])


def test_a_prompt_may_be_a_text_and_samples_have_one(
    texts: FakeWeftd, model_dir: Path
) -> None:
    own = ModelTokenizer.from_folder(model_dir)
    with weft.Client(texts.target) as client:
        adapter = client.create_adapter("a", rank=2)
        for sampler in (client, adapter):
            for result in (
                sampler.sample("w1 w2", max_tokens=4, seed=3),
                *sampler.sample_many(["w1 w2"], max_tokens=4, seed=3),
                sampler.submit.sample("w1 w2", max_tokens=4, seed=3).result(),
            ):
                (sample,) = result.samples
                assert sample.prompt == [1, 2]
                assert sample.text == own.decode(sample.tokens)
                assert pickle.loads(pickle.dumps(sample)).text == sample.text
            assert list(sampler.sample_stream("w1 w2", max_tokens=4))
            assert len(sampler.compute_logprobs("w1 w2 w3")) == 3
        assert client.tokenizer().chat_prompt(QUESTION) == own.chat_prompt(QUESTION)


def test_an_asyncio_client_takes_texts_too(texts: FakeWeftd) -> None:
    async def run() -> None:
        async with weft.AsyncClient(texts.target) as client:
            adapter = await client.create_adapter("a", rank=2)
            result = await adapter.sample("w1 w2", max_tokens=4)
            assert result.samples[0].prompt == [1, 2]
            datum = await client.datum({"prompt": "w1", "completion": " w3"})
            assert datum.tokens.tolist() == [1, 3]

    asyncio.run(run())


def test_without_a_tokenizer_the_error_says_what_to_call(texts: FakeWeftd) -> None:
    with weft.Client(texts.target) as client:
        with pytest.raises(weft.FailedPrecondition, match=r"call client.tokenizer"):
            client.sample_stream("w1 w2")
        client.tokenizer()
        assert client.submit.sample("w1 w2", max_tokens=4).result().samples[0].text


def test_the_tokenizer_is_kept_and_got_again_only_if_it_differs(
    texts: FakeWeftd, cache: Path
) -> None:
    def get() -> ModelTokenizer:
        with weft.Client(texts.target) as client:
            return client.tokenizer()

    for _ in range(2):
        assert get().encode("w1 w2") == [1, 2]
    assert sent_tokenizers(texts) == 1
    (kept,) = cache.rglob("tokenizer.json")
    kept.write_text(kept.read_text().replace("w1", "x1"))
    (kept.parent / "added_tokens.json").write_text("{}")
    assert get().encode("w1 w2") == [1, 2]
    assert sent_tokenizers(texts) == 2
    assert sorted(path.name for path in kept.parent.iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_chats_with_tools_have_the_servers_own_template(
    model_dir: Path, cache: Path, tmp_path: Path
) -> None:
    own = json.loads((model_dir / "tokenizer_config.json").read_text())["chat_template"]
    (model_dir / "chat_template.jinja").write_text(own)
    (model_dir / "additional_chat_templates").mkdir()
    more = "additional_chat_templates/tool_use.jinja"
    (model_dir / more).write_text("{{ tools[0].name }} " + own)
    chat = [{"role": "user", "content": "w2"}]
    with (
        FakeWeftd(f"--model={model_dir}") as server,
        weft.Client(server.target) as client,
    ):
        tokenizer = client.tokenizer()
        plain = tokenizer.chat_prompt(chat)
        assert tokenizer.chat_prompt(chat, tools=[{"name": "w7"}]) == [7, *plain]
    # An export has it, too, and loses it with the next tokenizer.
    export, scratch = tmp_path / "export", tmp_path / "scratch"
    for folder in (export, scratch):
        folder.mkdir()
        peft_extras.copy_tokenizer(model_dir, folder)
        (model_dir / more).unlink(missing_ok=True)
    assert (export / more).is_file() and not (scratch / more).exists()
    peft_extras.prepare(export, scratch)
    assert not (export / more).exists()


def test_a_cache_that_cannot_be_written_is_done_without(
    texts: FakeWeftd, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with weft.Client(texts.target) as client:
        assert client.tokenizer().encode("w1 w2") == [1, 2]


def test_files_of_another_fingerprint_are_refused(texts: FakeWeftd) -> None:
    with weft.Client(texts.target) as client:
        model = client.info().model
    with pytest.raises(weft.DataLoss, match="not a SHA-256"):
        ServedTokenizer(replace(model, tokenizer_fingerprint="../../.ssh"))
    chunk = server_pb2.TokenizerChunk(name="tokenizer.json", data=b"{}")
    with ServedTokenizer(model) as files:
        files.add(chunk)
        with pytest.raises(weft.DataLoss, match="the server's fingerprint"):
            files.keep()
        assert not files.is_cached()


def test_a_tokenizer_that_does_not_fit_is_refused(texts: FakeWeftd) -> None:
    with weft.Client(texts.target) as client:
        for names, message in (
            (WORDS[:5], r"has 5 tokens and no 'w5', but .* 12 and"),
            ([*WORDS[:3], "w4", "w3", *WORDS[5:]], r"'w3' the id 4, .* gives it 3"),
            ([*WORDS, *(f"x{i}" for i in range(100))], r"lie in \[0, 100\)"),
        ):
            with pytest.raises(weft.InvalidArgument, match=message) as caught:
                client.tokenizer(words(*names))
            assert "leave out --model-dir" in str(caught.value)
        own = words(*WORDS, "more")  # An addition changes no token of the server's.
        assert client.tokenizer(own) is own is client.tokenizer()
        assert own.vocab_size == 100


def test_a_server_without_a_tokenizer_says_so(server: FakeWeftd) -> None:
    with weft.Client(server.target) as client:
        with pytest.raises(weft.NotFound, match=r"no tokenizer\.json: .*--model-dir"):
            client.sample("w1")
        client.tokenizer(words(*WORDS))
        assert client.sample("end", max_tokens=2).samples[0].text is not None
        with pytest.raises(weft.InvalidArgument, match=r"lie in \[0, 100\)"):
            client.tokenizer(words(*WORDS, *(f"x{i}" for i in range(100))))


def test_texts_and_records_become_data(texts: FakeWeftd) -> None:
    with weft.Client(texts.target) as client:
        datum = client.datum({"prompt": "w1 w2", "completion": " w3"}, weight=0.5)
        assert datum.targets.tolist() == [2, 3, 0] and datum.weights is not None
        assert datum.weights.tolist() == [0, 0.5, 0.5]
        assert repr(datum) == "Datum(3 tokens, 2 targets learnt)"
        assert client.datum("w1 w3").targets.tolist() == [3, 0]
        # The server knows another end of sequence than the tokenizer.
        assert client.datum("w1 w2").targets.tolist() == [2]
        answer = {"role": "assistant", "content": "w4"}
        chat = client.datum({"messages": [*QUESTION, answer]})
        assert chat.targets.tolist() == [4, 0]
        with pytest.raises(weft.InvalidArgument, match="a record needs"):
            client.datum({"question": "w1"})


def test_a_records_token_outside_the_vocabulary_is_named(texts: FakeWeftd) -> None:
    bad: list[BadRecord] = []
    with weft.Client(texts.target) as client:
        encoder = Encoder(client.tokenizer(), eos=False)
    records = [{"tokens": [1, 99]}, {"tokens": [1, 2, 100]}]
    assert len(list(Dataset(records, encoder, on_bad=bad.append))) == 1
    assert [one.reason for one in bad] == [
        '"tokens"[2] is 100, must be a token id in [0, 100)'
    ]


def test_another_model_brings_another_tokenizer(
    texts: FakeWeftd, model_dir: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(app, "INFO_SECONDS", 0.0)
    body = {"model": "toy", "prompt": "w1 w2", "max_tokens": 1, "echo": True}
    with weft.Client(texts.target) as client, front_of(texts.target, None) as front:

        def echoed() -> str:
            reply = front.post("/v1/completions", json=body)
            text: str = reply.json()["choices"][0]["text"]
            return text

        assert client.tokenizer().encode("w1 w2") == [1, 2]
        assert echoed().startswith("w1 w2")
        texts.__exit__()
        path = model_dir / "tokenizer.json"
        path.write_text(path.read_text().replace("w2", "x2"))
        with FakeWeftd(f"--model={model_dir}", f"--listen={texts.target}"):
            assert client.tokenizer().encode("w1 w2 x2") == [1, 0, 2]
            assert echoed().startswith("w1 end")


def test_the_openai_front_gets_the_tokenizer_with_the_callers_key(
    texts: FakeWeftd, model_dir: Path
) -> None:
    body = {"model": "toy", "prompt": "w1 w2", "max_tokens": 3, "seed": 1}
    answers = []
    for own in (None, ModelTokenizer.from_folder(model_dir)):
        with front_of(texts.target, own) as front:
            answers.append(front.post("/v1/completions", json=body).json()["choices"])
    assert answers[0] == answers[1]
    with front_of(texts.target, words(*WORDS[:5])) as front:
        reply = front.post("/v1/completions", json=body)
        assert reply.status_code == 400
        assert "the tokenizer has 5 tokens" in reply.json()["error"]["message"]
