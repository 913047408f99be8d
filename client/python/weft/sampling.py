"""Builds the operations that draw from a model, for one prompt or for many, and those
that score data with it."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator

from weft import convert, methods
from weft._proto import sampling_pb2, training_pb2
from weft.datum import Datum
from weft.operations import Caller, Operation, Work
from weft.types import LossOptions, Prompt, SampleOptions, SampleResult, TrainResult

_LARGE = 1 << 18  # A reply of more bytes takes long to convert.
FIRST_LIMIT = 16
MOST = 4096  # The most calls in flight, even if the server admits more.


class InFlight:
    """Finds out how many calls the server admits at the same time.

    Keeps a bound on the calls in flight. Until the first refusal, each answer raises
    the bound by 1. So the bound doubles when all calls in flight have been answered.
    After the first refusal, each answer raises the bound by 1 / bound. A refusal halves
    the bound. But it does not if the bound was already halved since the same call
    started or was last refused. Threads: any.
    """

    def __init__(self, first: int = FIRST_LIMIT) -> None:
        self._lock = threading.Lock()
        self._limit = float(first)
        self._cuts = 0

    @property
    def limit(self) -> int:
        """Returns the present bound on the calls in flight, at least 1."""
        return int(self._limit)

    def answered(self) -> None:
        """Raises the bound, because a call has its answer."""
        with self._lock:
            step = 1.0 / self._limit if self._cuts else 1.0
            self._limit = min(self._limit + step, MOST)

    def watch(self) -> Callable[[], None]:
        """Returns a callback for a call that starts now. Run the callback each time the
        server refuses the call."""
        seen = self._cuts

        def refused() -> None:
            nonlocal seen
            with self._lock:
                if seen == self._cuts:
                    self._limit = max(1.0, self._limit / 2)
                    self._cuts += 1
                seen = self._cuts

        return refused


class SamplerCore:
    """Builds operations of one adapter, of one of its checkpoints, or of the base model
    (""). They change nothing on the server, so they may be repeated."""

    def __init__(
        self, caller: Caller, adapter_id: str = "", checkpoint: str = ""
    ) -> None:
        self._caller = caller
        self._adapter_id = adapter_id
        self._checkpoint = checkpoint

    def request(
        self, prompt: Prompt, options: SampleOptions, snapshot: str | None
    ) -> sampling_pb2.SampleRequest:
        tokens = self._caller.texts.tokens(prompt)
        return convert.sample_request(
            tokens, options, self._adapter_id, snapshot, self._checkpoint
        )

    def sample(
        self,
        prompt: Prompt,
        options: SampleOptions,
        snapshot: str | None = None,
        in_flight: InFlight | None = None,
    ) -> Operation[SampleResult]:
        """Builds one call.

        A call with `in_flight` is one of many. It has no deadline of its own, because
        it may wait until the server has answered the others.
        """
        request = self.request(prompt, options, snapshot)
        timeout = on_refusal = None
        if in_flight is not None:
            timeout, on_refusal = math.inf, in_flight.watch()
        reply = yield from self._caller.call(
            methods.SAMPLE, request, timeout=timeout, on_refusal=on_refusal
        )
        if in_flight is not None:
            in_flight.answered()
        make = functools.partial(
            convert.to_sample_result,
            reply.message,
            list(request.prompt),
            self._caller.texts.decode,
        )
        if reply.message.ByteSize() < _LARGE:
            return make()
        result: SampleResult = yield Work(make)
        return result

    def sample_each(
        self,
        prompts: Iterable[Prompt],
        options: SampleOptions,
        snapshot: str | None,
        in_flight: InFlight,
    ) -> Iterator[Operation[SampleResult]]:
        """Yields one operation per prompt. Prompt i uses seed + i, because prompts
        with the same seed would share their random numbers."""
        seed = options.get("seed")
        for index, prompt in enumerate(prompts):
            own: SampleOptions = {**options}
            if seed is not None:
                own["seed"] = seed + index
            yield self.sample(prompt, own, snapshot, in_flight)

    def score(
        self,
        data: Iterable[Datum],
        loss: str,
        options: LossOptions,
        snapshot: str | None = None,
    ) -> Operation[TrainResult]:
        """Builds a Forward without a step number."""
        batch = convert.data_list(data)
        request = training_pb2.ForwardRequest(
            adapter_id=self._adapter_id,
            data=[convert.datum_message(datum) for datum in batch],
            loss=convert.loss_config(loss, options),
            unnumbered=bool(self._adapter_id),  # The base model has no steps.
            snapshot=snapshot or "",
        )
        reply = yield from self._caller.call(methods.FORWARD, request)
        return convert.to_train_result(batch, reply)
