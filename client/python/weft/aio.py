"""The asyncio client: weft.client's methods as coroutines.

Make it inside the event loop that uses it; it is not for other threads.
"""

from __future__ import annotations

from asyncio import Task
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Unpack

from weft import convert, custom_loss, methods
from weft._proto import sampling_pb2
from weft.channel import Security
from weft.core import AdapterCore, ClientCore
from weft.folders import FolderWriter, StrPath
from weft.operations import Caller
from weft.retry import RetryPolicy
from weft.tasks import TaskDriver
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


class AsyncSubmit:
    """Steps numbered at the call, so that several can be in flight.

    Cancelling a task leaves it open whether its step ran.
    """

    def __init__(self, core: AdapterCore, driver: TaskDriver) -> None:
        self._core = core
        self._driver = driver

    def forward_backward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> Task[TrainResult]:
        """Adds the gradient of the summed loss to the accumulator."""
        return self._driver.submit(
            self._core.train(data, loss, options, backward=True, submit=True)
        )

    def forward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> Task[TrainResult]:
        """The same numbers without a gradient."""
        return self._driver.submit(
            self._core.train(data, loss, options, backward=False, submit=True)
        )

    def optim_step(self, **options: Unpack[OptimOptions]) -> Task[OptimResult]:
        """Applies AdamW to the accumulated gradient and clears it."""
        return self._driver.submit(self._core.optim_step(options, submit=True))


class AsyncAdapter:
    """One adapter on the server. Made by the AsyncClient's methods."""

    def __init__(self, client: AsyncClient, core: AdapterCore) -> None:
        self._client = client
        self._core = core
        self._driver = client._driver
        self.submit = AsyncSubmit(core, client._driver)

    def __repr__(self) -> str:
        return f"AsyncAdapter({self.id!r}, next_step={self.next_step})"

    @property
    def id(self) -> str:
        """The adapter's name on the server."""
        return self._core.adapter_id

    @property
    def next_step(self) -> int:
        """The number that the next step will carry."""
        return self._core.counter.next_step

    async def resync(self) -> int:
        """Learns the next step's number from the server and returns it.

        Needed after an error that says so. FailedPrecondition while steps are
        in flight.
        """
        return await self._driver.run(self._core.resync())

    async def forward_backward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> TrainResult:
        """Adds the gradient of the summed loss to the accumulator."""
        return await self._driver.run(
            self._core.train(data, loss, options, backward=True)
        )

    async def forward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> TrainResult:
        """The same numbers without a gradient."""
        return await self._driver.run(
            self._core.train(data, loss, options, backward=False)
        )

    async def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: custom_loss.LossFn
    ) -> TrainResult:
        """A loss of the log-probabilities that this process computes.

        loss_fn gets one array per datum and returns the loss and its gradient
        for each; `weft.torch_loss` makes one from torch code. Takes two steps.
        """
        forward = await self.forward(data)
        surrogate = custom_loss.surrogate(data, forward, loss_fn)
        return surrogate.finish(forward, await self.forward_backward(surrogate.data))

    async def optim_step(self, **options: Unpack[OptimOptions]) -> OptimResult:
        """Applies AdamW to the accumulated gradient and clears it."""
        return await self._driver.run(self._core.optim_step(options))

    async def sample(
        self,
        prompt: ArrayLike,
        *,
        snapshot: str | None = None,
        **options: Unpack[SampleOptions],
    ) -> SampleResult:
        """Samples from the latest version, or from a snapshot."""
        core = self._client._core
        return await self._driver.run(core.sample(prompt, options, self.id, snapshot))

    def sample_stream(
        self,
        prompt: ArrayLike,
        *,
        snapshot: str | None = None,
        **options: Unpack[SampleOptions],
    ) -> AsyncIterator[SampleDelta]:
        """The same tokens as they are made. Not repeated on errors."""
        return self._client._stream(prompt, options, self.id, snapshot)

    async def save(self, name: str, overwrite: bool = False) -> CheckpointInfo:
        """Writes a checkpoint on the server."""
        return await self._driver.run(self._core.save(name, overwrite))

    async def load(
        self, name: str, source: str | None = None, weights_only: bool = False
    ) -> AdapterInfo:
        """Replaces the state by a checkpoint (of adapter `source`)."""
        return await self._driver.run(self._core.load(name, source, weights_only))

    async def snapshot(self, name: str) -> int:
        """Pins the current weights under a name; returns their version."""
        return await self._driver.run(self._core.snapshot(name))

    async def release_snapshot(self, name: str) -> None:
        """Frees the snapshot once no sample uses it any more."""
        await self._driver.run(self._core.release_snapshot(name))

    async def export(self, folder: StrPath, *, snapshot: str | None = None) -> None:
        """Writes a PEFT folder on this machine."""
        request = self._core.export_request(snapshot)
        timeout = self._core.caller.timeout
        with FolderWriter(folder) as writer:
            async for message in self._driver.stream(
                methods.EXPORT_ADAPTER, request, timeout
            ):
                writer.add(message.chunk)
            writer.commit()

    async def info(self) -> AdapterInfo:
        """What the server says about the adapter."""
        return await self._driver.run(self._core.info())

    async def delete(self) -> None:
        """Forgets the adapter. Its checkpoints stay."""
        await self._client.delete_adapter(self.id)


class AsyncClient:
    """A connection to one server. Also an async context manager.

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
        self._driver = TaskDriver(target, security)
        self._core = ClientCore(Caller(timeout, retry))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and the calls in flight."""
        await self._driver.close()

    async def info(self) -> ServerInfo:
        """What the server runs and what it accepts."""
        return await self._driver.run(self._core.info())

    async def healthy(self) -> bool:
        """Whether the server takes work now. Never raises a WeftError."""
        return await self._driver.run(self._core.healthy())

    async def drain(self) -> None:
        """Lets the server finish what it accepted and take nothing new."""
        await self._driver.run(self._core.drain())

    async def create_adapter(
        self,
        adapter_id: str,
        *,
        rank: int = 32,
        alpha: float = 32.0,
        target_modules: Iterable[str] | None = None,
        seed: int | None = None,
        tenant: str | None = None,
    ) -> AsyncAdapter:
        """Makes a new adapter.

        target_modules: "q_proj", ... "down_proj", "lm_head", "embed_tokens".
        tenant: with whose other adapters it shares; None: a tenant of its own.
        """
        operation = self._core.create_adapter(
            adapter_id, rank, alpha, target_modules, seed, tenant
        )
        return AsyncAdapter(self, await self._driver.run(operation))

    async def adapter(self, adapter_id: str) -> AsyncAdapter:
        """An existing adapter; goes on after its last step."""
        return AsyncAdapter(
            self, await self._driver.run(self._core.adapter(adapter_id))
        )

    async def adapters(self) -> list[AdapterInfo]:
        """All adapters, ordered by id."""
        return await self._driver.run(self._core.adapters())

    async def delete_adapter(self, adapter_id: str) -> None:
        """Forgets an adapter. Its checkpoints stay."""
        await self._driver.run(self._core.delete_adapter(adapter_id))

    async def import_adapter(
        self, adapter_id: str, folder: StrPath, *, tenant: str | None = None
    ) -> AsyncAdapter:
        """Makes an adapter from a PEFT LoRA folder on this machine."""
        operation = self._core.import_adapter(adapter_id, folder, tenant)
        return AsyncAdapter(self, await self._driver.run(operation))

    async def checkpoints(self, adapter_id: str | None = None) -> list[CheckpointInfo]:
        """Newest first; of all adapters unless one is named."""
        return await self._driver.run(self._core.checkpoints(adapter_id))

    async def delete_checkpoint(self, adapter_id: str, name: str) -> None:
        """Deletes the checkpoint's files."""
        await self._driver.run(self._core.delete_checkpoint(adapter_id, name))

    async def sample(
        self, prompt: ArrayLike, **options: Unpack[SampleOptions]
    ) -> SampleResult:
        """Samples from the base model."""
        return await self._driver.run(self._core.sample(prompt, options))

    def sample_stream(
        self, prompt: ArrayLike, **options: Unpack[SampleOptions]
    ) -> AsyncIterator[SampleDelta]:
        """The same tokens as they are made. Not repeated on errors."""
        return self._stream(prompt, options)

    async def forward(
        self,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> TrainResult:
        """Scores with the base model."""
        return await self._driver.run(self._core.forward(data, loss, options))

    def _stream(
        self,
        prompt: ArrayLike,
        options: SampleOptions,
        adapter_id: str = "",
        snapshot: str | None = None,
    ) -> AsyncIterator[SampleDelta]:
        request = self._core.stream_request(prompt, options, adapter_id, snapshot)
        messages = self._driver.stream(
            methods.SAMPLE_STREAM, request, self._core.caller.timeout
        )
        return self._deltas(messages)

    @staticmethod
    async def _deltas(
        messages: AsyncIterator[sampling_pb2.SampleStreamResponse],
    ) -> AsyncIterator[SampleDelta]:
        async for message in messages:
            yield convert.to_sample_delta(message)
