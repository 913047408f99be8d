"""The synchronous client. Threads: any; each call may block its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Unpack

from weft import convert, custom_loss, methods
from weft.channel import Security
from weft.core import AdapterCore, ClientCore
from weft.folders import FolderWriter, StrPath
from weft.operations import Caller
from weft.retry import RetryPolicy
from weft.threads import ThreadDriver
from weft.types import (
    AdapterInfo,
    ArrayLike,
    CheckpointInfo,
    Datum,
    LossOptions,
    OptimOptions,
    OptimResult,
    SampleDelta,
    SampleOptions,
    SampleResult,
    ServerInfo,
    TrainResult,
)


class Submit:
    """Steps numbered at the call, so that several can be in flight.

    The futures cannot be cancelled; the client's timeout bounds them.
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


class Adapter:
    """One adapter on the server. Made by the Client's methods."""

    def __init__(self, client: Client, core: AdapterCore) -> None:
        self._client = client
        self._core = core
        self._driver = client._driver
        self.submit = Submit(core, client._driver)

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
        """Adds the gradient of the summed loss to the accumulator."""
        return self._driver.run(self._core.train(data, loss, options, backward=True))

    def forward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> TrainResult:
        """The same numbers without a gradient."""
        return self._driver.run(self._core.train(data, loss, options, backward=False))

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: custom_loss.LossFn
    ) -> TrainResult:
        """A loss of the log-probabilities that this process computes.

        loss_fn gets one array per datum and returns the loss and its gradient
        for each; `weft.torch_loss` makes one from torch code. Takes two steps.
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
        """Samples from the latest version, or from a snapshot."""
        core = self._client._core
        return self._driver.run(core.sample(prompt, options, self.id, snapshot))

    def sample_stream(
        self,
        prompt: ArrayLike,
        *,
        snapshot: str | None = None,
        **options: Unpack[SampleOptions],
    ) -> Iterator[SampleDelta]:
        """The same tokens as they are made. Not repeated on errors."""
        return self._client._stream(prompt, options, self.id, snapshot)

    def save(self, name: str, overwrite: bool = False) -> CheckpointInfo:
        """Writes a checkpoint on the server."""
        return self._driver.run(self._core.save(name, overwrite))

    def load(
        self, name: str, source: str | None = None, weights_only: bool = False
    ) -> AdapterInfo:
        """Replaces the state by a checkpoint (of adapter `source`)."""
        return self._driver.run(self._core.load(name, source, weights_only))

    def snapshot(self, name: str) -> int:
        """Pins the current weights under a name; returns their version."""
        return self._driver.run(self._core.snapshot(name))

    def release_snapshot(self, name: str) -> None:
        """Frees the snapshot once no sample uses it any more."""
        self._driver.run(self._core.release_snapshot(name))

    def export(self, folder: StrPath, *, snapshot: str | None = None) -> None:
        """Writes a PEFT folder on this machine."""
        request = self._core.export_request(snapshot)
        timeout = self._core.caller.timeout
        with FolderWriter(folder) as writer:
            for message in self._driver.stream(
                methods.EXPORT_ADAPTER, request, timeout
            ):
                writer.add(message.chunk)
            writer.commit()

    def info(self) -> AdapterInfo:
        """What the server says about the adapter."""
        return self._driver.run(self._core.info())

    def delete(self) -> None:
        """Forgets the adapter. Its checkpoints stay."""
        self._client.delete_adapter(self.id)


class Client:
    """A connection to one server. Also a context manager.

    timeout: seconds for each call, repetitions included.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        timeout: float = 600.0,
        retry: RetryPolicy = RetryPolicy(),
        security: Security | None = None,
    ) -> None:
        if security is None:
            security = Security.from_environment()
        self._driver = ThreadDriver(target, security)
        self._core = ClientCore(Caller(timeout, retry))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and the calls in flight."""
        self._driver.close()

    def info(self) -> ServerInfo:
        """What the server runs and what it accepts."""
        return self._driver.run(self._core.info())

    def healthy(self) -> bool:
        """Whether the server takes work now. Never raises a WeftError."""
        return self._driver.run(self._core.healthy())

    def drain(self) -> None:
        """Lets the server finish what it accepted and take nothing new."""
        self._driver.run(self._core.drain())

    def create_adapter(
        self,
        adapter_id: str,
        *,
        rank: int = 32,
        alpha: float = 32.0,
        target_modules: Iterable[str] | None = None,
        seed: int | None = None,
        tenant: str | None = None,
    ) -> Adapter:
        """Makes a new adapter.

        target_modules: "q_proj", ... "down_proj", "lm_head", "embed_tokens".
        tenant: with whose other adapters it shares; None: a tenant of its own.
        """
        operation = self._core.create_adapter(
            adapter_id, rank, alpha, target_modules, seed, tenant
        )
        return Adapter(self, self._driver.run(operation))

    def adapter(self, adapter_id: str) -> Adapter:
        """An existing adapter; goes on after its last step."""
        return Adapter(self, self._driver.run(self._core.adapter(adapter_id)))

    def adapters(self) -> list[AdapterInfo]:
        """All adapters, ordered by id."""
        return self._driver.run(self._core.adapters())

    def delete_adapter(self, adapter_id: str) -> None:
        """Forgets an adapter. Its checkpoints stay."""
        self._driver.run(self._core.delete_adapter(adapter_id))

    def import_adapter(
        self, adapter_id: str, folder: StrPath, *, tenant: str | None = None
    ) -> Adapter:
        """Makes an adapter from a PEFT LoRA folder on this machine."""
        operation = self._core.import_adapter(adapter_id, folder, tenant)
        return Adapter(self, self._driver.run(operation))

    def checkpoints(self, adapter_id: str | None = None) -> list[CheckpointInfo]:
        """Newest first; of all adapters unless one is named."""
        return self._driver.run(self._core.checkpoints(adapter_id))

    def delete_checkpoint(self, adapter_id: str, name: str) -> None:
        """Deletes the checkpoint's files."""
        self._driver.run(self._core.delete_checkpoint(adapter_id, name))

    def sample(
        self, prompt: ArrayLike, **options: Unpack[SampleOptions]
    ) -> SampleResult:
        """Samples from the base model."""
        return self._driver.run(self._core.sample(prompt, options))

    def sample_stream(
        self, prompt: ArrayLike, **options: Unpack[SampleOptions]
    ) -> Iterator[SampleDelta]:
        """The same tokens as they are made. Not repeated on errors."""
        return self._stream(prompt, options)

    def forward(
        self,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> TrainResult:
        """Scores with the base model."""
        return self._driver.run(self._core.forward(data, loss, options))

    def _stream(
        self,
        prompt: ArrayLike,
        options: SampleOptions,
        adapter_id: str = "",
        snapshot: str | None = None,
    ) -> Iterator[SampleDelta]:
        request = self._core.stream_request(prompt, options, adapter_id, snapshot)
        messages = self._driver.stream(
            methods.SAMPLE_STREAM, request, self._core.caller.timeout
        )
        return map(convert.to_sample_delta, messages)
