"""One adapter of the synchronous client. Threads: any; a call may block its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Unpack

from weft import custom_loss, methods
from weft.core import AdapterCore
from weft.datum import Datum
from weft.folders import FolderWriter, StrPath
from weft.sampling import InFlight
from weft.threads import ThreadDriver
from weft.types import (
    AdapterInfo,
    ArrayLike,
    CheckpointInfo,
    FloatArray,
    LossOptions,
    OptimOptions,
    OptimResult,
    SampleDelta,
    SampleOptions,
    SampleResult,
    TrainResult,
)


class Submit:
    """Calls that return at once, so that several can be in flight.

    Steps are numbered at the call and run in that order. A call that
    cannot be sent at all raises here, what else goes wrong is raised by the future.
    Futures cannot be cancelled; the client's timeout bounds them. Their callbacks
    may submit calls, but not wait for any (FailedPrecondition).
    """

    def __init__(self, core: AdapterCore, driver: ThreadDriver) -> None:
        self._core = core
        self._driver = driver

    def forward_backward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> Future[TrainResult]:
        """Adds the gradient of the summed loss to the accumulator."""
        return self._driver.submit(
            self._core.train(data, loss, options, backward=True, submit=True)
        )

    def forward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> Future[TrainResult]:
        """The same numbers without a gradient."""
        return self._driver.submit(
            self._core.train(data, loss, options, backward=False, submit=True)
        )

    def optim_step(self, **options: Unpack[OptimOptions]) -> Future[OptimResult]:
        """Applies AdamW to the accumulated gradient and clears it."""
        return self._driver.submit(self._core.optim_step(options, submit=True))

    def save(self, name: str, overwrite: bool = False) -> Future[CheckpointInfo]:
        """Writes a checkpoint on the server, as of the steps before it."""
        return self._driver.submit(self._core.save(name, overwrite, submit=True))

    def snapshot(self, name: str) -> Future[int]:
        """Pins the weights as of the steps before it; gives their version."""
        return self._driver.submit(self._core.snapshot(name, submit=True))

    def sample(
        self,
        prompt: ArrayLike,
        *,
        snapshot: str | None = None,
        **options: Unpack[SampleOptions],
    ) -> Future[SampleResult]:
        """Samples from a snapshot, or from the version that is the latest when
        sampling starts: it has no number and waits for no step."""
        return self._driver.submit(self._core.sampler.sample(prompt, options, snapshot))


class Adapter:
    """One adapter on the server. Made by the Client's methods.

    Every call raises a WeftError where the server refuses it, where it fails, or
    where the client's timeout passes first.
    """

    def __init__(self, core: AdapterCore, driver: ThreadDriver) -> None:
        self._core = core
        self._driver = driver
        self.submit = Submit(core, driver)

    def __repr__(self) -> str:
        return f"Adapter({self.id!r}, next_step={self.next_step})"

    @property
    def id(self) -> str:
        """The adapter's name on the server."""
        return self._core.adapter_id

    @property
    def next_step(self) -> int:
        """The number that the next step will carry."""
        return self._core.counter.next_step

    def resync(self) -> int:
        """Learns the next step's number from the server and returns it.

        Needed after an error that says so. FailedPrecondition while steps are
        in flight.
        """
        return self._driver.run(self._core.resync())

    def forward_backward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> TrainResult:
        """Adds the gradient of the summed loss to the accumulator.

        loss: cross_entropy, importance_sampling, ppo, cispo, dro or gspo. The
        results are in the data's order, each of the shape of its targets.
        InvalidArgument for data that the loss or the server's limits forbid.
        """
        return self._driver.run(self._core.train(data, loss, options, backward=True))

    def forward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> TrainResult:
        """The same numbers without a gradient."""
        return self._driver.run(self._core.train(data, loss, options, backward=False))

    def score(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        *,
        snapshot: str | None = None,
        **options: Unpack[LossOptions],
    ) -> TrainResult:
        """As forward, beside the steps: it takes no number and waits for none that is
        missing, so that an evaluator disturbs no trainer. Without a snapshot it sees
        the latest weights when it runs."""
        return self._driver.run(self._core.score(data, loss, options, snapshot))

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: custom_loss.LossFn
    ) -> TrainResult:
        """A loss of the log-probabilities that this process computes.

        loss_fn gets one array per datum and returns the loss and its gradient
        for each; `weft.torch_loss` makes one from torch code. Takes two steps.
        InvalidArgument for gradients of another number or shape.
        """
        forward = self.forward(data)
        surrogate = custom_loss.surrogate(data, forward, loss_fn)
        return surrogate.finish(forward, self.forward_backward(surrogate.data))

    def optim_step(self, **options: Unpack[OptimOptions]) -> OptimResult:
        """Applies AdamW to the accumulated gradient and clears it."""
        return self._driver.run(self._core.optim_step(options))

    def sample(
        self,
        prompt: ArrayLike,
        *,
        snapshot: str | None = None,
        **options: Unpack[SampleOptions],
    ) -> SampleResult:
        """Samples from the latest version, or from a snapshot.

        prompt: [P] token ids, 1 <= P < the model's context. NotFound for a
        snapshot that is not there.
        """
        return self._driver.run(self._core.sampler.sample(prompt, options, snapshot))

    def sample_many(
        self,
        prompts: Iterable[ArrayLike],
        *,
        snapshot: str | None = None,
        **options: Unpack[SampleOptions],
    ) -> list[SampleResult]:
        """`num_samples` samples of each prompt; results in the prompts' order.

        As many prompts are in flight as the server admits. Where it is full, the
        client comes again when the server says. Prompt i is drawn with seed + i.
        The first error that remains is raised and ends the rest.
        The client's timeout bounds the time from one answer to the next: the whole
        may take longer.
        """
        bound = InFlight()
        each = self._core.sampler.sample_each(prompts, options, snapshot, bound)
        return self._driver.run_many(
            each, lambda: bound.limit, self._core.caller.timeout
        )

    def sample_stream(
        self,
        prompt: ArrayLike,
        *,
        snapshot: str | None = None,
        **options: Unpack[SampleOptions],
    ) -> Iterator[SampleDelta]:
        """The same tokens as they are made. Not repeated on errors."""
        request = self._core.sampler.stream_request(prompt, options, snapshot)
        return self._driver.deltas(request, self._core.caller.timeout)

    def compute_logprobs(
        self, tokens: ArrayLike, *, snapshot: str | None = None
    ) -> FloatArray:
        """The log-probability of each token after those before it, [N].

        tokens: [N], 1 <= N < the model's context. The first is 0 and means
        nothing: nothing predicts it. Not a step: `forward` scores data.
        """
        return self._driver.run(self._core.sampler.compute_logprobs(tokens, snapshot))

    def save(self, name: str, overwrite: bool = False) -> CheckpointInfo:
        """Writes a checkpoint on the server.

        AlreadyExists for a name that is taken, unless it may be overwritten.
        """
        return self._driver.run(self._core.save(name, overwrite))

    def load(
        self, name: str, source: str | None = None, weights_only: bool = False
    ) -> AdapterInfo:
        """Replaces the state by a checkpoint (of adapter `source`).

        NotFound where there is none of that name; FailedPrecondition while steps
        are in flight.
        """
        return self._driver.run(self._core.load(name, source, weights_only))

    def snapshot(self, name: str) -> int:
        """Pins the current weights under a name; returns their version."""
        return self._driver.run(self._core.snapshot(name))

    def release_snapshot(self, name: str) -> None:
        """Frees the snapshot once no sample uses it any more."""
        self._driver.run(self._core.release_snapshot(name))

    def export(self, folder: StrPath, *, snapshot: str | None = None) -> None:
        """Writes a PEFT folder on this machine: all of it, or nothing."""
        request = self._core.export_request(snapshot)
        timeout = self._core.caller.timeout
        with FolderWriter(folder) as writer:
            for message in self._driver.stream(
                methods.EXPORT_ADAPTER, request, timeout
            ):
                writer.add(message.chunk)
            writer.commit()

    def info(self) -> AdapterInfo:
        """What the server says about the adapter. NotFound once it is gone."""
        return self._driver.run(self._core.info())

    def delete(self) -> None:
        """Forgets the adapter. Its checkpoints stay."""
        self._driver.run(self._core.delete())
