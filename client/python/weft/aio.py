"""The asyncio client: weft.client's methods as coroutines.

Make it inside the event loop that uses it; it is not for other threads.
"""

from __future__ import annotations

from asyncio import Task
from collections.abc import AsyncIterator, Iterable
from typing import Unpack

from weft.aio_adapter import AsyncAdapter
from weft.channel import Security
from weft.core import ClientCore
from weft.datum import Datum
from weft.folders import StrPath
from weft.operations import Caller
from weft.retry import RetryPolicy
from weft.sampling import InFlight
from weft.tasks import TaskDriver
from weft.types import (
    AdapterInfo,
    ArrayLike,
    CheckpointInfo,
    FloatArray,
    LossOptions,
    SampleDelta,
    SampleOptions,
    SampleResult,
    ServerInfo,
    TrainResult,
)


class AsyncBaseSubmit:
    """The base model's calls that return at once, so that several can be in flight."""

    def __init__(self, core: ClientCore, driver: TaskDriver) -> None:
        self._core = core
        self._driver = driver

    def sample(
        self, prompt: ArrayLike, **options: Unpack[SampleOptions]
    ) -> Task[SampleResult]:
        """Samples from the base model. prompt: [P] token ids, 1 <= P < context."""
        return self._driver.submit(self._core.sampler.sample(prompt, options))

    def forward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> Task[TrainResult]:
        """Scores with the base model; results in the data's order."""
        return self._driver.submit(self._core.forward(data, loss, options))


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
        self.submit = AsyncBaseSubmit(self._core, self._driver)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and the calls in flight; later ones raise
        FailedPrecondition."""
        self._core.caller.close()
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

        target_modules: "q_proj", ... "down_proj", "lm_head", "embed_tokens"; None:
        the server's default. tenant: with whose other adapters it shares; None: a
        tenant of its own. AlreadyExists where the name is taken.
        """
        operation = self._core.create_adapter(
            adapter_id, rank, alpha, target_modules, seed, tenant
        )
        return AsyncAdapter(await self._driver.run(operation), self._driver)

    async def get_or_create(
        self,
        adapter_id: str,
        *,
        rank: int = 32,
        alpha: float = 32.0,
        target_modules: Iterable[str] | None = None,
        seed: int | None = None,
        tenant: str | None = None,
    ) -> AsyncAdapter:
        """The adapter of that name, made if there is none: for a program that may
        run twice. An existing one goes on after its last step.

        FailedPrecondition where it exists with another rank, alpha or
        target_modules; seed and tenant are for a new one.
        """
        operation = self._core.get_or_create(
            adapter_id, rank, alpha, target_modules, seed, tenant
        )
        return AsyncAdapter(await self._driver.run(operation), self._driver)

    async def adapter(self, adapter_id: str) -> AsyncAdapter:
        """An existing adapter; goes on after its last step. NotFound without it."""
        core = await self._driver.run(self._core.adapter(adapter_id))
        return AsyncAdapter(core, self._driver)

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
        return AsyncAdapter(await self._driver.run(operation), self._driver)

    async def checkpoints(self, adapter_id: str | None = None) -> list[CheckpointInfo]:
        """Newest first; of all adapters unless one is named."""
        return await self._driver.run(self._core.checkpoints(adapter_id))

    async def delete_checkpoint(self, adapter_id: str, name: str) -> None:
        """Deletes the checkpoint's files."""
        await self._driver.run(self._core.delete_checkpoint(adapter_id, name))

    async def sample(
        self, prompt: ArrayLike, **options: Unpack[SampleOptions]
    ) -> SampleResult:
        """Samples from the base model. prompt: [P] token ids, 1 <= P < context."""
        return await self._driver.run(self._core.sampler.sample(prompt, options))

    async def sample_many(
        self, prompts: Iterable[ArrayLike], **options: Unpack[SampleOptions]
    ) -> list[SampleResult]:
        """Samples of each prompt from the base model, in the prompts' order; see
        `Adapter.sample_many`."""
        bound = InFlight()
        each = self._core.sampler.sample_each(prompts, options, None, bound)
        return await self._driver.run_many(
            each, lambda: bound.limit, self._core.caller.timeout
        )

    def sample_stream(
        self, prompt: ArrayLike, **options: Unpack[SampleOptions]
    ) -> AsyncIterator[SampleDelta]:
        """The same tokens as they are made. Not repeated on errors."""
        request = self._core.sampler.stream_request(prompt, options)
        return self._driver.deltas(request, self._core.caller.timeout)

    async def compute_logprobs(self, tokens: ArrayLike) -> FloatArray:
        """The base model's log-probability of each token after those before it, [N].

        tokens: [N], 1 <= N < the model's context. The first is 0 and means
        nothing: nothing predicts it.
        """
        return await self._driver.run(self._core.sampler.compute_logprobs(tokens))

    async def forward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> TrainResult:
        """Scores with the base model; results in the data's order."""
        return await self._driver.run(self._core.forward(data, loss, options))
