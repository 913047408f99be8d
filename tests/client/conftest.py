"""Fixtures of the Python client's tests. Generates its missing modules."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CLIENT = Path(__file__).resolve().parents[2] / "client" / "python"
sys.path.insert(0, str(CLIENT))

import generate  # noqa: E402

generate.ensure()

from fake_weftd import START_SECONDS, FakeWeftd  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

import weft  # noqa: E402
from weft import methods  # noqa: E402

WORDS = ["end", *(f"w{n}" for n in range(1, 12))]
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
REWARD = (
    "def reward(reply):\n    return float(len(reply.text) + reply.record['bonus'])\n"
)
Capture = pytest.CaptureFixture[str]
Logs = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch
# Requests of the fixture `sent`, and words of a command line.
Sent = list[Any]
Options = list[str]
FAST = weft.RetryPolicy(max_attempts=4, initial_delay=0.01, max_delay=0.05)


@contextmanager
def closed_port() -> Iterator[str]:
    """Yields an address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def server() -> Iterator[FakeWeftd]:
    with FakeWeftd() as fake:
        yield fake


@pytest.fixture
def sent(monkeypatch: Patch) -> Sent:
    """Returns a list that collects requests as they are serialized. Clients made
    before this fixture do not add their requests."""
    messages: list[Any] = []

    def bind(method: methods.Method[Any, Any], channel: Any) -> Any:
        def serialize(request: Any) -> bytes:
            messages.append(request)
            data: bytes = request.SerializeToString()
            return data

        return getattr(channel, method.arity.value)(
            method.path,
            request_serializer=serialize,
            response_deserializer=method.response_type.FromString,
        )

    monkeypatch.setattr(methods.Method, "bind", bind)
    return messages


@pytest.fixture
def client(server: FakeWeftd) -> Iterator[weft.Client]:
    with weft.Client(server.target, timeout=20.0, retry=FAST) as made:
        yield made


def save_tokenizer(
    folder: Path, words: Sequence[str], unknown: str, config: Mapping[str, object]
) -> None:
    """Writes a tokenizer that gives each word its place, and its configuration."""
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"eos_token": "end", "chat_template": TEMPLATE}
    save_tokenizer(folder, WORDS, "end", config)
    return folder


@pytest.fixture
def base(model_dir: Path, server: FakeWeftd, tmp_path: Path) -> Options:
    """Returns the options that the tests give to every recipe."""
    return [
        *("--model-dir", str(model_dir), "--server", server.target),
        *("--adapter", "a", "--output", str(tmp_path / "run"), "--rank", "4"),
    ]


@pytest.fixture
def texts(tmp_path: Path) -> Options:
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": f"w{n} w{n + 1} w{n + 2}"}) for n in range(1, 9)]
    path.write_text("\n".join([*lines, "{"]))
    return ["--data", str(path)]


@pytest.fixture
def play(tmp_path: Path) -> Options:
    """Writes prompts and a reward function. Returns the options that name them."""
    path = tmp_path / "prompts.jsonl"
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"w{n}"}], "bonus": 5})
        for n in range(1, 9)
    ]
    path.write_text("\n".join(lines))
    (tmp_path / "score.py").write_text(REWARD)
    return ["--data", str(path), "--reward", str(tmp_path / "score.py")]


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def log(tmp_path: Path) -> list[dict[str, float]]:
    """Returns the rows in the log of a run with the options of `base`."""
    return [json.loads(line) for line in (tmp_path / "run/log.jsonl").open()]
