"""The asyncio client, from which generate.py makes the synchronous weft.client.

An asyncio client belongs to the event loop of its first call. Other threads must not
use it.
"""

from __future__ import annotations

import difflib
from asyncio import Task
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Unpack

from google.protobuf import wrappers_pb2

from weft import convert, methods
from weft._proto import adapters_pb2, server_pb2
from weft.aio_adapter import AsyncAdapter, AsyncSampler, AsyncSamplerSubmit
from weft.channel import Security
from weft.data import ModelTokenizer, Record
from weft.datum import Datum
from weft.errors import AlreadyExists, FailedPrecondition, NotFound, WeftError
from weft.folders import FolderWriter, import_requests, upload_requests
from weft.operations import Caller, Reply
from weft.options import takes
from weft.retry import RetryPolicy
from weft.route import Route
from weft.served_tokenizer import make_datum
from weft.tasks import TaskDriver
from weft.types import (
    AdapterInfo,
    AdapterOptions,
    CheckpointInfo,
    LossOptions,
    ServerInfo,
    StrPath,
    TrainResult,
)

HEALTH_TIMEOUT = 5.0  # Seconds.


class AsyncBaseSubmit(AsyncSamplerSubmit):
    """Calls to the base model that return at once, so that several can be in flight."""

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
        return self._driver.submit(self._sampler.score(data, loss, options))


class AsyncClient(AsyncSampler):
    """A connection to one server, and a sampler of its base model. `async with` closes
    it at the end.

    target: the server's address, HOST:PORT, or those of several servers with commas
    between them, of which the client calls the next when one cannot be reached. If
    another server has the state, or a call's adapter, the client calls that one.
    timeout: the seconds that a call may take, including retries; None: no limit. retry:
    how often and after which delays a failed call is repeated. security: TLS and token
    for all servers; None reads them from the environment.
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
        route = Route(target, security)
        driver = TaskDriver(route)
        super().__init__(Caller(route, timeout, retry), driver)
        self.submit = AsyncBaseSubmit(self._sampler, driver)

    def __repr__(self) -> str:
        return f"AsyncClient({self._caller.contact.target!r})"

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and the calls in flight. Later calls raise
        FailedPrecondition, and so do calls that are waiting for a retry."""
        self._caller.close()
        if not self._caller.is_forked():
            await self._driver.close()

    async def info(self) -> ServerInfo:
        """Returns which model the server runs and which limits it has."""
        reply = await self._call(methods.GET_INFO, server_pb2.GetInfoRequest())
        return convert.to_server_info(reply.info)

    async def healthy(self) -> bool:
        """Returns whether the server takes work now.

        Returns False if the call fails or the server does not answer within 5 seconds.
        """
        operation = self._caller.call(
            methods.HEALTH_CHECK,
            wrappers_pb2.StringValue(),
            timeout=min(HEALTH_TIMEOUT, self._caller.timeout),
            retry=False,
        )
        try:
            reply = await self._driver.run(operation)
        except WeftError:
            return False
        return reply.message.value == methods.HEALTH_SERVING

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
        return await self._load_tokenizer(own, chat_template, chat_template_kwargs)

    async def datum(self, record: Record | str, *, weight: float = 1.0) -> Datum:
        """Returns training data of a text, or of a record of `weft.data.Encoder`, such
        as {"prompt": ..., "completion": ...} or {"messages": [...]}.

        weight: the weight of each learnt token. Raises InvalidArgument for a record
        with nothing to learn, and what `tokenizer` raises.
        """
        await self._prepare([""])
        return make_datum(self._caller.texts.require(), record, weight)

    async def drain(self) -> None:
        """Makes the server refuse new work. Returns when the server has finished the
        work that it accepted before."""
        await self._call(methods.DRAIN, server_pb2.DrainRequest(), retry=False)

    async def undrain(self) -> None:
        """Makes the server take new work again."""
        await self._call(methods.UNDRAIN, server_pb2.UndrainRequest(), retry=False)

    def _handle(self, adapter: adapters_pb2.Adapter) -> AsyncAdapter:
        return AsyncAdapter(self._caller, self._driver, adapter)

    async def _get(self, adapter_id: str) -> adapters_pb2.Adapter:
        request = adapters_pb2.GetAdapterRequest(adapter_id=adapter_id)
        return (await self._call(methods.GET_ADAPTER, request)).adapter

    @takes(AdapterOptions)
    async def create_adapter(
        self, adapter_id: str, **options: Unpack[AdapterOptions]
    ) -> AsyncAdapter:
        """Makes a new adapter and returns it.

        Raises AlreadyExists if the name is taken, FailedPrecondition if the server
        cannot offer the durability.
        """
        request = adapters_pb2.CreateAdapterRequest(
            adapter_id=adapter_id,
            config=convert.lora_config(options),
            tenant=options.get("tenant"),
            durability=convert.durability_name(options.get("durability")),
        )
        return self._handle((await self._call(methods.CREATE_ADAPTER, request)).adapter)

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
        # An adapter that exists must not hide values that no server takes.
        wanted = convert.lora_config(options)
        try:
            adapter = await self._get(adapter_id)
        except NotFound:
            try:
                return await self.create_adapter(adapter_id, **options)
            except AlreadyExists:  # Another client has made it at the same time.
                adapter = await self._get(adapter_id)
        config = convert.to_adapter_info(adapter).config
        found: dict[str, object] = {"rank": config.rank, "alpha": config.alpha}
        asked: dict[str, object] = {"rank": wanted.rank, "alpha": wanted.alpha}
        modules = options.get("target_modules")
        if modules is not None:
            found["target_modules"] = sorted(config.target_modules)
            asked["target_modules"] = sorted(modules)
        if found != asked:
            raise FailedPrecondition(
                f"adapter {adapter_id!r} exists with {found}, asked for {asked}"
            )
        return self._handle(adapter)

    async def adapter(self, adapter_id: str, *, suggests: bool = True) -> AsyncAdapter:
        """Returns an existing adapter, which continues after its last step.

        Raises NotFound if there is no adapter of that name. If `suggests`, the message
        has the name of an adapter that is spelled almost so, which takes calls that
        list all adapters.
        """
        try:
            return self._handle(await self._get(adapter_id))
        except NotFound as error:
            if not suggests:
                raise
            with suppress(WeftError):
                ids = [info.adapter_id for info in await self.adapters()]
                for near in difflib.get_close_matches(adapter_id, ids, n=1):
                    error.message += f"; did you mean {near!r}?"
            raise

    async def adapters(self) -> list[AdapterInfo]:
        """Returns all adapters, ordered by id.

        Of servers that share a state, each has some of the adapters. The error of a
        server that does not list its adapters has its address.
        """
        found: dict[str, AdapterInfo] = {}
        # Each server by the address that names it; "": that of the client's calls.
        servers = [("", self._caller)]
        for named, caller in servers:
            try:
                adapters, others, answered = await self._list(caller)
            except WeftError as error:
                if named:
                    error.message = f"no adapters of {named}: {error.message}"
                raise
            for adapter in adapters:
                found[adapter.adapter_id] = convert.to_adapter_info(adapter)
            if named == answered:
                continue
            # The first server, or one in place of another, which may know a third.
            for other in others:
                if other not in dict(servers):
                    servers.append((other, caller.other(answered, other)))
        if len(servers) == 1:
            return [*found.values()]
        return [found[adapter_id] for adapter_id in sorted(found)]

    async def _list(
        self, caller: Caller
    ) -> tuple[list[adapters_pb2.Adapter], Iterable[str], str]:
        """Returns one server's adapters, the addresses of others, and its own."""
        request = adapters_pb2.ListAdaptersRequest()
        first = page = await self._page(caller, request)
        adapters = [*first.message.adapters]
        while page.message.next_page_token:
            request.page_token = page.message.next_page_token
            page = await self._page(caller, request)
            if page.server != first.server:  # That one has other adapters.
                return await self._list(caller)
            adapters += page.message.adapters
        return adapters, first.message.others, first.server

    async def _page(
        self, caller: Caller, request: adapters_pb2.ListAdaptersRequest
    ) -> Reply[adapters_pb2.ListAdaptersResponse]:
        operation = caller.call(methods.LIST_ADAPTERS, request)
        return await self._driver.run(operation)

    async def delete_adapter(self, adapter_id: str) -> None:
        """Deletes an adapter and its snapshots. Its checkpoints stay on disk."""
        request = adapters_pb2.DeleteAdapterRequest(adapter_id=adapter_id)
        await self._call(methods.DELETE_ADAPTER, request, gone_is_done=True)

    async def move_adapter(self, adapter_id: str, log: int) -> None:
        """Takes an adapter to the owner of a log, of the servers that share a state.

        Needs a token with the scope admin. Returns when that server has the adapter.
        Clients that use the adapter meanwhile wait, and find it there. Raises Aborted
        if that server did not take it, FailedPrecondition if it has no room.
        """
        request = adapters_pb2.MoveAdapterRequest(adapter_id=adapter_id, log=log)
        await self._call(methods.MOVE_ADAPTER, request)

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
        requests = import_requests(adapter_id, folder, tenant, durability)
        reply = await self._call(methods.IMPORT_ADAPTER, requests, retry=False)
        return self._handle(reply.adapter)

    async def checkpoints(self, adapter_id: str | None = None) -> list[CheckpointInfo]:
        """Returns the checkpoints of one adapter, or of all, newest first."""
        request = adapters_pb2.ListCheckpointsRequest(adapter_id=adapter_id or "")
        reply = await self._call(methods.LIST_CHECKPOINTS, request)
        return [convert.to_checkpoint_info(one) for one in reply.checkpoints]

    async def delete_checkpoint(self, adapter_id: str, name: str) -> None:
        """Deletes a checkpoint's files on the server. Raises NotFound if there is no
        such checkpoint."""
        request = adapters_pb2.DeleteCheckpointRequest(adapter_id=adapter_id, name=name)
        await self._call(methods.DELETE_CHECKPOINT, request, gone_is_done=True)

    async def set_checkpoint_ttl(
        self, adapter_id: str, name: str, ttl_seconds: int
    ) -> CheckpointInfo:
        """Has the server delete a checkpoint ttl_seconds from now; 0: never.

        Raises NotFound if there is no such checkpoint.
        """
        request = adapters_pb2.SetCheckpointTtlRequest(
            adapter_id=adapter_id, name=name, ttl_seconds=ttl_seconds
        )
        reply = await self._call(methods.SET_CHECKPOINT_TTL, request)
        return convert.to_checkpoint_info(reply.checkpoint)

    async def download_checkpoint(
        self, adapter_id: str, name: str, folder: StrPath
    ) -> None:
        """Writes a checkpoint's files to a folder on this machine.

        Files in the folder are replaced only after the last byte has arrived. PEFT can
        load the folder. Raises NotFound if there is no such checkpoint.
        """
        self._caller.require_open()
        request = adapters_pb2.DownloadCheckpointRequest(
            adapter_id=adapter_id, name=name
        )
        with FolderWriter(folder) as writer:
            async for message in self._driver.stream(
                methods.DOWNLOAD_CHECKPOINT, request, self._caller.timeout
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
        requests = upload_requests(adapter_id, name, folder, overwrite, tenant)
        reply = await self._call(methods.UPLOAD_CHECKPOINT, requests, retry=False)
        return convert.to_checkpoint_info(reply.checkpoint)

    def checkpoint(self, adapter_id: str, name: str) -> AsyncSampler:
        """Returns a sampler of a checkpoint. Makes no call.

        The adapter need not exist, and any server with the same store of checkpoints
        takes the calls. They raise NotFound if there is no such checkpoint, and
        FailedPrecondition if it is of another base model.
        """
        return AsyncSampler(self._caller, self._driver, adapter_id, name)

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
        return await self._driver.run(self._sampler.score(data, loss, options))
