"""Compares string stops with transformers' StopStringCriteria. The stops are random
parts of random texts, for byte-level and byte-fallback tokenizers."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StopStringCriteria

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("WEFT_BUILD_DIR", ROOT / "build" / "cpu"))
SMOLLM2 = ROOT / "models" / "smollm2-135m-instruct"
WORDS = (
    "the reply ends here and so does this line of code return None if not x: pass\n"
    "stop </s> ### Answer: 42 User: \n\n naïve café über Straße 日本語 end. ok?! {} ;"
).split(" ")
SPACE = "\u2581"  # SentencePiece's space.


def byte_level(path: Path) -> None:
    """Makes a tokenizer like GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(300), trainer)
    tokenizer.save(str(path))


def byte_fallback(path: Path, prefix: bool) -> None:
    """Makes a tokenizer like Llama 2's and Mistral's, with a space before the text,
    or like Gemma's."""
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    if prefix:
        steps.insert(0, normalizers.Prepend(SPACE))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(steps)
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    named = ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(
        vocab_size=700,
        special_tokens=named + pieces,
        # Some characters have no token of their own, but their bytes have tokens.
        limit_alphabet=60,
        show_progress=False,
    )
    # Trains on words, because otherwise whole texts would become one token.
    space = "" if prefix else " "
    words = (space + word for text in texts(300) for word in text.split(" "))
    tokenizer.train_from_iterator(words, trainer)
    told = json.loads(tokenizer.to_str())
    # SentencePiece's tokenizers do not list the byte pieces as added tokens.
    told["added_tokens"] = [t for t in told["added_tokens"] if t["content"] in named]
    path.write_text(json.dumps(told))


def texts(count: int) -> Iterable[str]:
    source = random.Random(7)
    for _ in range(count):
        yield " ".join(source.choice(WORDS) for _ in range(source.randint(6, 14)))


KINDS: dict[str, Callable[[Path], None]] = {
    "byte_level": byte_level,
    "llama": lambda path: byte_fallback(path, prefix=True),
    "gemma": lambda path: byte_fallback(path, prefix=False),
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    KINDS[request.param](made / "tokenizer.json")
    return made


def tokenizer_of(folder: Path) -> Any:
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_file=str(folder / "tokenizer.json"))


def ask(folder: Path, cases: list[tuple[list[int], str]]) -> list[int]:
    """Returns the number of tokens up to the stop for each case; 0: no stop."""
    lines = "".join(
        json.dumps({"tokens": tokens, "stops": [stop]}) + "\n" for tokens, stop in cases
    )
    done = subprocess.run(
        [BUILD / "tests" / "oracle" / "stop_points", folder],
        input=lines,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [int(line) for line in done.stdout.split()]


def criterion(tokenizer: Any, tokens: list[int], stop: str) -> int:
    """Returns where transformers would stop. Row i holds the first i + 1 tokens."""
    size = len(tokens)
    vocab = tokenizer.get_vocab()
    rows = torch.full((size, size), vocab.get("<0x00>", vocab.get("\u0100")))
    for i in range(size):
        rows[i, size - 1 - i :] = torch.tensor(tokens[: i + 1])
    stops = StopStringCriteria(tokenizer, [stop])(rows, None)
    return int(stops.int().argmax()) + 1 if stops.any() else 0


def cuts(tokenizer: Any, count: int, seed: int) -> list[tuple[list[int], str]]:
    """Returns pairs of a text's tokens and a stop. The stop is a part of the text or
    of another text. The texts are ASCII, because tokens may split other characters,
    and transformers does not handle split characters."""
    source = random.Random(seed)
    whole = [text for text in texts(200) if text.isascii()]
    cases = []
    for _ in range(count):
        text, other = source.choice(whole), source.choice(whole)
        begin = source.randint(1, len(other) - 9)
        stop = other[begin : begin + source.randint(1, 8)]
        if source.random() < 0.7:
            begin = source.randint(1, len(text) - 9)
            stop = text[begin : begin + source.randint(1, 8)]
        cases.append((tokenizer.encode(text, add_special_tokens=False), stop))
    return cases


def test_random_cuts(folder: Path) -> None:
    tokenizer = tokenizer_of(folder)
    cases = cuts(tokenizer, 334, seed=3)
    expected = [criterion(tokenizer, tokens, stop) for tokens, stop in cases]
    assert sum(point == 0 for point in expected) > 30
    assert sum(0 < p < len(c[0]) for p, c in zip(expected, cases, strict=True)) > 100
    assert ask(folder, cases) == expected


def test_cuts_of_the_models_tokenizer() -> None:
    tokenizer = tokenizer_of(SMOLLM2)
    cases = cuts(tokenizer, 6, seed=5)
    expected = [criterion(tokenizer, tokens, stop) for tokens, stop in cases]
    assert ask(SMOLLM2, cases) == expected


def test_added_tokens(folder: Path, tmp_path: Path) -> None:
    """Added tokens decode like all others, whatever their names are."""
    added = [
        SPACE * 2,
        f"x{SPACE}y",
        "\u0120z",
        "<0x41>",
        "\n\n",
        "<|end|>",
        "\u4e00 a",
    ]
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Models ship their added tokens with normalized=False, too.
    made.add_tokens([AddedToken(name, normalized=False) for name in added])
    made.save(str(tmp_path / "tokenizer.json"))
    first = made.encode("stop", add_special_tokens=False).ids
    ids = made.get_vocab()
    cases, expected = [], []
    for name in added:
        tokens = [*first, ids[name], *first]
        decoded = made.decode(tokens[: len(first) + 1], skip_special_tokens=False)
        written = decoded.removeprefix(made.decode(first))
        # A stop that is the token's text ends the sample. A stop that is only its name
        # does not.
        for stop in sorted({written, name}):
            cases.append((tokens, stop))
            expected.append(len(first) + 1 if stop == written else 0)
    assert len(cases) > len(added)
    assert ask(tmp_path, cases) == expected


def test_characters_of_many_tokens(folder: Path) -> None:
    """The stops are around a character that is not ASCII. Such a character may have a
    token for each of its bytes."""
    tokenizer = tokenizer_of(folder)
    source = random.Random(11)
    cases, expected = [], []
    for text in texts(150):
        if text.isascii():
            continue
        at = next(i for i, c in enumerate(text) if not c.isascii())
        stop = text[max(at - source.randint(0, 3), 1) : at + source.randint(1, 4)]
        if not stop:
            continue
        tokens = tokenizer.encode(text, add_special_tokens=False)
        cases.append((tokens, stop))
        expected.append(
            next(
                (
                    n
                    for n in range(1, len(tokens) + 1)
                    if stop in tokenizer.decode(tokens[:n])
                ),
                0,
            )
        )
    assert len(cases) > 50
    assert ask(folder, cases) == expected
