"""Reads records from JSONL, Parquet, Hugging Face datasets or any iterable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.errors import InvalidArgument
from weft.types import StrPath

Record = Mapping[str, object]
# A path to a Parquet or JSONL file, "hf:NAME[:SPLIT]", or the records themselves.
Source = StrPath | Iterable[Record]

HUB = "hf:"
# Files of other forms, which would be one error in each line.
OTHERS = (".csv", ".tsv", ".xlsx", ".arrow", ".gz", ".zip", ".zst")
ROWS = 1024  # The number of rows of a Parquet file that are in memory at once.


@dataclass(frozen=True)
class Located:
    """A record and its place in the source, or what is wrong at that place."""

    where: str  # Such as "chats.jsonl:17".
    record: Record | None
    problem: str = ""


def read(source: Source) -> Iterator[Located]:
    """Yields a source's records one at a time. Sets `problem` for an entry that is not
    a record.

    Raises InvalidArgument if the source as a whole cannot be read, for example because
    the file or a package is missing.
    """
    if not isinstance(source, str) and isinstance(source, Iterable):
        return _numbered(map(_present, source), "record ")
    text = str(source)
    if text.startswith(HUB):
        return _hub(text)
    path = Path(text)
    if not path.exists():  # Unlike is_file, accepts pipes.
        raise InvalidArgument(f"{path}: no such file")
    if path.is_dir() or path.suffix in OTHERS:
        kind = "is a folder" if path.is_dir() else f"has the form {path.suffix}"
        raise InvalidArgument(
            f"{path} {kind}; read are .jsonl, .json (a list), .parquet and {HUB}NAME"
        )
    if path.suffix == ".parquet":
        return _parquet(path)
    return _array(path) if path.suffix == ".json" else _lines(path)


def _located(where: str, value: object) -> Located:
    if isinstance(value, Mapping):
        return Located(where, value)
    return Located(where, None, "not an object")


def _numbered(records: Iterable[object], prefix: str) -> Iterator[Located]:
    for number, record in enumerate(records, start=1):
        yield _located(f"{prefix}{number}", record)


def _lines(path: Path) -> Iterator[Located]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                yield _located(where, json.loads(line))
            except (ValueError, RecursionError) as error:  # JSON may nest too deeply.
                yield Located(where, None, f"not JSON: {error}")


def _array(path: Path) -> Iterator[Located]:
    """Reads a list of records, or lines of records under the other name."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return _lines(path)
    if not isinstance(value, list):
        value = [value]
    return _numbered(value, f"{path}:")


def _parquet(path: Path) -> Iterator[Located]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise InvalidArgument(
            f"{path}: Parquet needs the package pyarrow: pip install pyarrow"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(ROWS)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from _numbered(map(_present, rows), f"{path}:")
    except ArrowException as error:
        raise InvalidArgument(f"{path}: {error}") from error


def _hub(source: str) -> Iterator[Located]:
    try:
        import datasets
    except ImportError:
        raise InvalidArgument(
            f"{source} needs the package datasets: pip install datasets"
        ) from None
    name, _, split = source.removeprefix(HUB).partition(":")
    try:
        records = datasets.load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:  # No such name, split or format, or no network.
        raise InvalidArgument(f"{source}: {error}") from error
    return _numbered(map(_present, _streamed(records, source)), f"{source}:")


def _streamed(records: Iterable[object], source: str) -> Iterator[object]:
    """Yields the records of a stream. If a read fails (a bad file, no network), raises
    InvalidArgument with the number of the record."""
    number = 0
    try:
        for record in records:
            number += 1
            yield record
    except Exception as error:  # Each format and file system raises its own.
        raise InvalidArgument(f"{source}:{number + 1}: {error}") from error


def _present(value: object) -> object:
    """Returns a table's row without its null fields, at any depth. A table holds null
    for a field that a record does not have."""
    if isinstance(value, Mapping):
        return {k: _present(v) for k, v in value.items() if v is not None}
    return [_present(one) for one in value] if isinstance(value, list) else value
