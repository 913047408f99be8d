"""The asyncio client, from which generate.py makes the synchronous weft.client.

An asyncio client belongs to the event loop of its first call. Other threads must not
use it.
"""

from __future__ import annotations

from asyncio import Task
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Unpack

from weft import methods
from weft.aio_adapter import AsyncAdapter, load_tokenizer, prepare_texts
from weft.channel import Security
from weft.core import ClientCore
from weft.data import ModelTokenizer, Record
from weft.datum import Datum
from weft.folders import FolderWriter, StrPath
from weft.operations import Caller
from weft.options import takes
from weft.retry import RetryPolicy
from weft.sampling import InFlight
from weft.served_tokenizer import make_datum
from weft.tasks import TaskDriver
from weft.types import (
    AdapterInfo,
    AdapterOptions,
    CheckpointInfo,
    FloatArray,
    LossOptions,
    Prompt,
    SampleDelta,
    SampleOptions,
    SampleResult,
    ServerInfo,
    TrainResult,
)


class AsyncBaseSubmit:
    """Calls to the base model that return at once, so that several can be in flight."""

    def __init__(self, core: ClientCore, driver: TaskDriver) -> None:
        self._core = core
        self._driver = driver

    @takes(SampleOptions)
    def sample(
        self, prompt: Prompt, **options: Unpack[SampleOptions]
    ) -> Task[SampleResult]:
        """Samples from the base model. Returns at once.

        prompt: [P] token ids, 1 <= P < the model's context.
        """
        return self._driver.submit(self._core.sampler.sample(prompt, options))

    @takes(LossOptions)
    def forward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> Task[TrainResult]:
        """Computes the loss of the data under the base model. Returns at once.

        The results are in the data's order.
        """
        return self._driver.submit(self._core.forward(data, loss, options))


class AsyncClient:
    """A connection to one server. `async with` closes it at the end.

    target: the server's address, host:port. timeout: the seconds that a call may
    take, including retries; None: no limit. retry: how often and after which delays a
    failed call is repeated. security: TLS and token; None reads them from the
    environment.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        timeout: float | None = 600.0,
        retry: RetryPolicy = RetryPolicy(),
        security: Security | None = None,
    ) -> None:
        if security is None:
            security = Security.from_environment()
        self._driver = TaskDriver(target, security)
        self._core = ClientCore(Caller(target, timeout, retry))
        self.submit = AsyncBaseSubmit(self._core, self._driver)

    def __repr__(self) -> str:
        return f"AsyncClient({self._core.caller.contact.target!r})"

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and the calls in flight. Later calls raise
        FailedPrecondition, and so do calls that are waiting for a retry."""
        self._core.caller.close()
        if not self._core.caller.is_forked():
            await self._driver.close()

    async def info(self) -> ServerInfo:
        """Returns which model the server runs and which limits it has."""
        return await self._driver.run(self._core.info())

    async def healthy(self) -> bool:
        """Returns whether the server takes work now.

        Returns False if the call fails or the server does not answer within 5 seconds.
        """
        return await self._driver.run(self._core.healthy())

    async def tokenizer(
        self,
        own: ModelTokenizer | None = None,
        *,
        chat_template: StrPath | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> ModelTokenizer:
        """Returns the tokenizer of the server's model.

        The client keeps the server's files in ~/.cache/weft (or XDG_CACHE_HOME) by
        their fingerprint, and gets them only if they are not there. Each call asks
        whether the server still has the same ones. With a tokenizer, prompts may be
        texts, and samples have a text.

        own: a tokenizer to use in place of the server's, with its own template.
        chat_template, chat_template_kwargs: as those of ModelTokenizer.from_folder, for
        the server's. Raises InvalidArgument if `own` gives a token another id than the
        server's, NotFound if the server has no tokenizer and `own` is None.
        """
        return await load_tokenizer(
            self._core.caller, self._driver, own, chat_template, chat_template_kwargs
        )

    async def datum(self, record: Record | str, *, weight: float = 1.0) -> Datum:
        """Returns training data of a text, or of a record of `weft.data.Encoder`, such
        as {"prompt": ..., "completion": ...} or {"messages": [...]}.

        weight: the weight of each learnt token. Raises InvalidArgument for a record
        with nothing to learn, and what `tokenizer` raises.
        """
        await prepare_texts(self._core.caller, self._driver, [""])
        return make_datum(self._core.caller.texts.require(), record, weight)

    async def drain(self) -> None:
        """Makes the server refuse new work. Returns when the server has finished the
        work that it accepted before."""
        await self._driver.run(self._core.drain())

    async def undrain(self) -> None:
        """Makes the server take new work again."""
        await self._driver.run(self._core.undrain())

    @takes(AdapterOptions)
    async def create_adapter(
        self, adapter_id: str, **options: Unpack[AdapterOptions]
    ) -> AsyncAdapter:
        """Makes a new adapter and returns it.

        Raises AlreadyExists if the name is taken, FailedPrecondition if the server
        cannot offer the durability.
        """
        operation = self._core.create_adapter(adapter_id, options)
        return AsyncAdapter(await self._driver.run(operation), self._driver)

    @takes(AdapterOptions)
    async def get_or_create(
        self, adapter_id: str, **options: Unpack[AdapterOptions]
    ) -> AsyncAdapter:
        """Returns the adapter of that name, or makes it if there is none.

        So a restarted program finds its adapter, which continues after its last step.
        seed, expert_rank, tenant and durability matter only for a new adapter. Raises
        FailedPrecondition if the adapter exists with another rank, alpha or
        target_modules.
        """
        operation = self._core.get_or_create(adapter_id, options)
        return AsyncAdapter(await self._driver.run(operation), self._driver)

    async def adapter(self, adapter_id: str) -> AsyncAdapter:
        """Returns an existing adapter, which continues after its last step.

        Raises NotFound if there is no adapter of that name.
        """
        core = await self._driver.run(self._core.adapter(adapter_id))
        return AsyncAdapter(core, self._driver)

    async def adapters(self) -> list[AdapterInfo]:
        """Returns all adapters, ordered by id."""
        return await self._driver.run(self._core.adapters())

    async def delete_adapter(self, adapter_id: str) -> None:
        """Deletes an adapter and its snapshots. Its checkpoints stay on disk."""
        await self._driver.run(self._core.delete_adapter(adapter_id))

    async def import_adapter(
        self,
        adapter_id: str,
        folder: StrPath,
        *,
        tenant: str | None = None,
        durability: str | None = None,
    ) -> AsyncAdapter:
        """Makes an adapter from a PEFT LoRA folder on this machine and returns it.

        tenant, durability: as in create_adapter. Raises InvalidArgument if the folder
        lacks adapter_config.json or adapter_model.safetensors. The call is not
        repeated when it fails.
        """
        operation = self._core.import_adapter(adapter_id, folder, tenant, durability)
        return AsyncAdapter(await self._driver.run(operation), self._driver)

    async def checkpoints(self, adapter_id: str | None = None) -> list[CheckpointInfo]:
        """Returns the checkpoints of one adapter, or of all, newest first."""
        return await self._driver.run(self._core.checkpoints(adapter_id))

    async def delete_checkpoint(self, adapter_id: str, name: str) -> None:
        """Deletes a checkpoint's files on the server. Raises NotFound if there is no
        such checkpoint."""
        await self._driver.run(self._core.delete_checkpoint(adapter_id, name))

    async def download_checkpoint(
        self, adapter_id: str, name: str, folder: StrPath
    ) -> None:
        """Writes a checkpoint's files to a folder on this machine.

        Files in the folder are replaced only after the last byte has arrived. PEFT can
        load the folder. Raises NotFound if there is no such checkpoint.
        """
        request = self._core.download_request(adapter_id, name)
        timeout = self._core.caller.timeout
        with FolderWriter(folder) as writer:
            async for message in self._driver.stream(
                methods.DOWNLOAD_CHECKPOINT, request, timeout
            ):
                writer.add(message.chunk)
            writer.commit()

    async def upload_checkpoint(
        self,
        adapter_id: str,
        name: str,
        folder: StrPath,
        *,
        overwrite: bool = False,
        tenant: str | None = None,
    ) -> CheckpointInfo:
        """Makes a checkpoint on the server from a downloaded folder.

        The adapter need not exist, because loading the checkpoint creates it. tenant:
        as in create_adapter. Raises InvalidArgument if the folder holds no checkpoint,
        FailedPrecondition if the checkpoint is of another base model, AlreadyExists if
        the name is taken and overwrite is False. The call is not repeated when it
        fails.
        """
        operation = self._core.upload_checkpoint(
            adapter_id, name, folder, overwrite, tenant
        )
        return await self._driver.run(operation)

    @takes(SampleOptions)
    async def sample(
        self, prompt: Prompt, **options: Unpack[SampleOptions]
    ) -> SampleResult:
        """Samples from the base model.

        prompt: a text, or [P] token ids, 1 <= P < the model's context.
        """
        await prepare_texts(self._core.caller, self._driver, [prompt])
        return await self._driver.run(self._core.sampler.sample(prompt, options))

    @takes(SampleOptions)
    async def sample_many(
        self, prompts: Iterable[Prompt], **options: Unpack[SampleOptions]
    ) -> list[SampleResult]:
        """Samples from the base model for each prompt. The results are in the prompts'
        order. `Adapter.sample_many` describes retries, seeds and errors."""
        known = self._core.caller.texts.prompts(prompts)
        await prepare_texts(self._core.caller, self._driver, known)
        bound = InFlight()
        each = self._core.sampler.sample_each(known, options, None, bound)
        return await self._driver.run_many(
            each, lambda: bound.limit, self._core.caller.timeout
        )

    @takes(SampleOptions)
    def sample_stream(
        self, prompt: Prompt, **options: Unpack[SampleOptions]
    ) -> AsyncIterator[SampleDelta]:
        """Yields the tokens that `sample` would return, as soon as they are drawn.

        A stream that fails raises the error and is not repeated.
        """
        request = self._core.sampler.stream_request(prompt, options)
        return self._driver.deltas(request, self._core.caller.timeout)

    async def compute_logprobs(self, tokens: Prompt) -> FloatArray:
        """Returns the base model's log-probability of each token, given the tokens
        before it, [N].

        tokens: [N], 1 <= N < the model's context. The first value is 0 and has no
        meaning, because no token comes before the first.
        """
        await prepare_texts(self._core.caller, self._driver, [tokens])
        return await self._driver.run(self._core.sampler.compute_logprobs(tokens))

    @takes(LossOptions)
    async def forward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> TrainResult:
        """Computes the loss of the data under the base model.

        The results are in the data's order.
        """
        return await self._driver.run(self._core.forward(data, loss, options))
