"""A client of weftd that measures how long drawing takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import inputs
import numpy as np
import timing

import weft

MIXED_ADAPTERS = 8
GROUP_SIZE = 16
PAIRS = 5

Points = dict[str, float]  # Seconds, keyed by the name of the measured call.


def decoding_seconds(drawn: float, prefill: float) -> float:
    """Returns the seconds after the first token. `drawn` is the time of the whole call,
    and `prefill` is the time of a call for one token. Returns `drawn` if
    it is not longer than `prefill`, which happens with a tiny model."""
    return drawn - prefill if drawn > prefill else drawn


class SampleClient:
    """Measures one daemon."""

    def __init__(
        self,
        options: argparse.Namespace,
        client: Any,
        prompts: np.ndarray,
        group: np.ndarray,
    ):
        self._options, self._client = options, client
        self._prompts, self._group = prompts, group
        self._vocab = inputs.config(options.model)["vocab_size"]
        self._random = np.random.default_rng(inputs.SEED)
        self._pool = ThreadPoolExecutor(max(*options.batches, GROUP_SIZE))

    def measure(
        self, reading_seconds: Callable[[], float] | None, *, groups: bool
    ) -> dict[str, Any]:
        """Returns `seconds` by the name of the call, `tokens` by batch, and `pairs`
        (see _pairs), which is empty without `reading_seconds`. With `groups`, also
        times mixed adapters and samples of one prompt."""
        options, seconds, tokens = self._options, {}, {}
        for batch in options.batches:
            calls = [(self._client, row) for row in self._prompts[:batch]]
            tokens[str(batch)] = self._draw(calls, options.tokens)
            seconds[str(batch)] = self._time(calls, options.tokens)
            seconds[f"{batch} prefill"] = self._time(calls, 1)
        if groups:
            seconds |= self._time_adapters()
            seconds["group"], seconds["separate"] = self._time_group()
        pairs = [] if reading_seconds is None else self._pairs(reading_seconds)
        return {"seconds": seconds, "tokens": tokens, "pairs": pairs}

    def _time_adapters(self) -> dict[str, float]:
        rows = self._prompts[:MIXED_ADAPTERS]
        adapters = [self._adapter(f"a{i}") for i in range(MIXED_ADAPTERS)]
        one = [(adapters[0], row) for row in rows]
        mixed = list(zip(adapters, rows, strict=True))
        return {
            "one adapter": self._time(one, self._options.tokens),
            "mixed adapters": self._time(mixed, self._options.tokens),
        }

    def _pairs(self, reading_seconds: Callable[[], float]) -> list[Points]:
        """Draws one sequence PAIRS times. `token` is the seconds of one token.
        `reading` is the seconds that memory needs to deliver the bytes of a decode
        iteration. It is the mean of measurements directly before and after the draw."""
        calls = [(self._client, self._prompts[0])]
        pairs = []
        before = reading_seconds()
        for _ in range(PAIRS):
            prefill = self._timed(calls, 1)
            drawn = self._timed(calls, self._options.tokens)
            after = reading_seconds()
            token = decoding_seconds(drawn, prefill) / (self._options.tokens - 1)
            pairs.append({"token": token, "reading": (before + after) / 2})
            before = after
        return pairs

    def _adapter(self, name: str) -> Any:
        adapter = self._client.create_adapter(name, rank=self._options.rank)
        row = self._prompts[0]
        adapter.forward_backward([weft.Datum.next_token(row)])
        adapter.optim_step(learning_rate=1e-3)
        return adapter

    def _time(self, calls: list[tuple[Any, np.ndarray]], tokens: int) -> float:
        return min(self._timed(calls, tokens) for _ in range(self._options.reps))

    def _timed(self, calls: list[tuple[Any, np.ndarray]], tokens: int) -> float:
        """Times the calls once. Gives each prompt a new first token, so that no cache
        has the prompt."""
        calls = [(source, self._fresh(row)) for source, row in calls]
        return timing.once(lambda: self._draw(calls, tokens))

    def _fresh(self, row: np.ndarray) -> np.ndarray:
        """Returns the row with another first token."""
        row = row.copy()
        row[0] = self._random.integers(3, self._vocab)
        return row

    def _draw(
        self, calls: list[tuple[Any, np.ndarray]], tokens: int
    ) -> list[list[int]]:
        def one(call: tuple[Any, np.ndarray]) -> list[int]:
            source, row = call
            drawn = source.sample(
                row, max_tokens=tokens, temperature=0.0, ignore_eos=True
            )
            return [int(token) for token in drawn.samples[0].tokens]

        return list(self._pool.map(one, calls))

    def _time_group(self) -> tuple[float, float]:
        """Returns the seconds of drawing GROUP_SIZE samples of one long prompt, and of
        drawing one sample for each of GROUP_SIZE prompts. All prompts have the same
        length, and they share no prefix. Each time is the least of several repetitions,
        after one that warms up."""
        tokens = self._options.group_tokens
        calls = [(self._client, row) for row in self._group]
        together, separate = [], []
        for _ in range(1 + self._options.reps):
            together.append(self._timed_group(tokens))
            separate.append(self._timed(calls, tokens))
        return min(together[1:]), min(separate[1:])

    def _timed_group(self, tokens: int) -> float:
        row = self._fresh(self._group[0])
        return timing.once(
            lambda: self._client.sample(
                row,
                num_samples=GROUP_SIZE,
                max_tokens=tokens,
                temperature=0.0,
                ignore_eos=True,
            )
        )
