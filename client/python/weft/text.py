"""Text in and out for the command line, by a model folder's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from weft.errors import InvalidArgument
from weft.folders import StrPath
from weft.types import Datum

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(model_dir: StrPath) -> Tokenizer:
    """The folder's tokenizer.json. Needs the package `tokenizers`."""
    path = Path(model_dir, "tokenizer.json")
    if not path.is_file():
        raise InvalidArgument(f"no tokenizer.json in {model_dir}")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InvalidArgument(
            "text needs the package tokenizers: pip install 'weft[cli]'"
        ) from None
    return Tokenizer.from_file(str(path))


def read_records(file: TextIO, name: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; errors name the line."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InvalidArgument(f"{name}:{number}: {error}") from None
        if not isinstance(record, dict):
            raise InvalidArgument(f"{name}:{number}: not a JSON object")
        yield record


def tokenize_record(record: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """{"text": ...} or {"prompt": ..., "completion": ...} to token ids.

    A prompt is read but not learnt: it gives the prompt_length. Records that
    already have "tokens" stay as they are.
    """
    if "tokens" in record:
        return record
    if "text" in record:
        return {"tokens": tokenizer.encode(record["text"]).ids}
    if "prompt" in record and "completion" in record:
        prompt = tokenizer.encode(record["prompt"]).ids
        completion = tokenizer.encode(
            record["completion"], add_special_tokens=False
        ).ids
        return {"tokens": prompt + completion, "prompt_length": len(prompt)}
    raise InvalidArgument(
        'a record needs "text", "prompt" and "completion", or "tokens"; '
        f"it has {sorted(record)}"
    )


def record_datum(record: dict[str, Any]) -> Datum:
    """A tokenized record as training data."""
    return Datum.next_token(
        record["tokens"], prompt_length=record.get("prompt_length", 0)
    )
