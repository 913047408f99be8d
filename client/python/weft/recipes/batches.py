"""Chooses the examples of a step, and cuts a batch into requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from weft.datum import Datum
from weft.types import ServerInfo

# Five arrays of 4 bytes per token, and room for the message around them.
BYTES_PER_TOKEN = 24


class BatchOrder:
    """Cuts shuffled epochs into batches. A batch may span two epochs.

    The seed alone decides which examples step n takes. So a resumed run takes the same
    examples as a run that was not interrupted. count: the number of examples, at least
    1. batch: the number of examples in a batch.
    """

    def __init__(self, count: int, batch: int, seed: int) -> None:
        self._count = count
        self._batch = batch
        self._seed = seed
        self._epoch = -1  # The epoch to which _order belongs.
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def indices(self, step: int) -> list[int]:
        """Returns the indices of a step's examples, [batch]. Steps count from 0."""
        first = step * self._batch
        return [self._at(position) for position in range(first, first + self._batch)]

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self._count)
        if epoch != self._epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._epoch, self._order = epoch, generator.permutation(self._count)
        return int(self._order[offset])


def requests(data: Sequence[Datum], info: ServerInfo) -> Iterator[list[Datum]]:
    """Yields the data in order, in as few requests as the server's limits allow."""
    most_tokens = min(
        info.max_tokens_per_request, info.max_message_bytes // BYTES_PER_TOKEN
    )
    request: list[Datum] = []
    tokens = 0
    for datum in data:
        full = len(request) >= info.max_data_per_request
        if request and (full or tokens + len(datum.tokens) > most_tokens):
            yield request
            request, tokens = [], 0
        request.append(datum)
        tokens += len(datum.tokens)
    if request:
        yield request
