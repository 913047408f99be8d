"""Reads a source as examples. Reports and counts the bad records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from weft.data.sources import Record, Source, read
from weft.errors import InvalidArgument

T = TypeVar("T")
_log = logging.getLogger("weft.data")


@dataclass(frozen=True)
class BadRecord:
    """A record that the dataset leaves out, and why."""

    where: str  # Such as "chats.jsonl:17".
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def log_bad_record(bad: BadRecord) -> None:
    """Logs a bad record as a warning of the logger "weft.data"."""
    _log.warning("left out: %s", bad)


class Dataset(Generic[T]):
    """Streams a source through an encoder. Each iteration reads the source again.

    source: a path, "hf:NAME[:SPLIT]" or an iterable of mappings, such as a list or a
    Hugging Face dataset. encode: a function such as an `Encoder`; it raises
    InvalidArgument for a bad record. on_bad: called for each bad record. num_good and
    num_bad count the records of the latest iteration. Iterating raises InvalidArgument
    if the source cannot be read.
    """

    def __init__(
        self,
        source: Source,
        encode: Callable[[Record], T],
        *,
        on_bad: Callable[[BadRecord], None] = log_bad_record,
    ) -> None:
        self._source = source
        self._encode = encode
        self._on_bad = on_bad
        self.num_good = 0
        self.num_bad = 0

    def __iter__(self) -> Iterator[T]:
        """Yields one example at a time, in the source's order."""
        self.num_good = self.num_bad = 0
        for located in read(self._source):
            try:
                if located.record is None:
                    raise InvalidArgument(located.problem)
                example = self._encode(located.record)
            except InvalidArgument as error:
                self.num_bad += 1
                self._on_bad(BadRecord(located.where, error.message))
                continue
            self.num_good += 1
            yield example

    def load(self) -> list[T]:
        """Returns all examples. Raises InvalidArgument if there is none."""
        examples = list(self)
        if not examples:
            raise InvalidArgument(
                f"{self._source}: no usable record, {self.num_bad} bad ones"
            )
        return examples
