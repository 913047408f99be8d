"""Chooses the examples of a step, and cuts a batch into requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from weft.datum import Datum
from weft.types import ServerInfo

# Upper bounds: the bytes of a sequence in a request besides its arrays, and the bytes
# of a request besides its sequences.
BYTES_AROUND_DATUM = 96
BYTES_AROUND_REQUEST = 1024


class BatchOrder:
    """Cuts shuffled epochs into batches. A batch may span several epochs.

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
    most_bytes = info.max_message_bytes - BYTES_AROUND_REQUEST
    request: list[Datum] = []
    tokens = size = 0
    for datum in data:
        datum_tokens, datum_size = len(datum.tokens), _message_bytes(datum)
        if request and (
            len(request) >= info.max_data_per_request
            or tokens + datum_tokens > info.max_tokens_per_request
            or size + datum_size > most_bytes
        ):
            yield request
            request, tokens, size = [], 0, 0
        request.append(datum)
        tokens += datum_tokens
        size += datum_size
    if request:
        yield request


def _message_bytes(datum: Datum) -> int:
    """Returns an upper bound of the bytes that a sequence takes in a request."""
    arrays = (
        datum.tokens,
        datum.targets,
        datum.target_offsets,
        datum.weights,
        datum.logprobs,
        datum.advantages,
        datum.routing,
    )
    support = datum.support or ()
    return (
        BYTES_AROUND_DATUM
        + sum(a.nbytes for a in arrays if a is not None)
        + sum(4 + ids.nbytes for ids in support)
        + sum(32 + len(span.sequence_id) for span in datum.sampled)
    )
