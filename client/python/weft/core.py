"""The part that the synchronous and the asyncio classes share: it builds one
operation per API method. The classes only choose the driver and add streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from google.protobuf import wrappers_pb2

from weft import convert, methods
from weft._proto import adapters_pb2, server_pb2, training_pb2
from weft.convert import TrainRequest, TrainResponse
from weft.datum import Datum
from weft.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    Unavailable,
    WeftError,
)
from weft.folders import StrPath, import_requests, upload_requests
from weft.methods import Method, RequestT, ResponseT
from weft.operations import Caller, Operation, Reply, Sleep
from weft.sampling import SamplerCore
from weft.steps import StepCounter, StepSlot
from weft.types import (
    AdapterInfo,
    AdapterOptions,
    CheckpointInfo,
    LossOptions,
    OptimOptions,
    OptimResult,
    SaveOptions,
    ServerInfo,
    TrainResult,
)

T = TypeVar("T")
HEALTH_TIMEOUT = 5.0  # Seconds.


class AdapterCore:
    """Builds the operations of one adapter and numbers its steps."""

    def __init__(self, caller: Caller, adapter: adapters_pb2.Adapter) -> None:
        self.caller = caller
        self.adapter_id = adapter.adapter_id
        self.tenant = adapter.tenant
        self.sampler = SamplerCore(caller, adapter.adapter_id)
        self.counter = StepCounter(adapter.adapter_id, adapter.next_step, adapter.epoch)

    def _step(
        self,
        submit: bool,
        method: Method[RequestT, ResponseT],
        build: Callable[[StepSlot], RequestT],
        convert_reply: Callable[[Reply[ResponseT]], T],
    ) -> Operation[T]:
        make = self.caller.submit_step if submit else self.caller.step
        return make(self.counter, method, build, convert_reply)

    def train(
        self,
        data: Iterable[Datum],
        loss: str,
        options: LossOptions,
        *,
        backward: bool,
        submit: bool = False,
    ) -> Operation[TrainResult]:
        """Builds a ForwardBackward or a Forward. Converts the data before it takes a
        step number, so data that cannot be sent uses no step number."""
        batch = convert.data_list(data)
        messages = [convert.datum_message(datum) for datum in batch]
        config = convert.loss_config(loss, options)
        if backward:
            return self._train(
                submit, methods.FORWARD_BACKWARD, batch, messages, config
            )
        return self._train(submit, methods.FORWARD, batch, messages, config)

    def _train(
        self,
        submit: bool,
        method: Method[TrainRequest, TrainResponse],
        batch: list[Datum],
        messages: list[training_pb2.Datum],
        config: training_pb2.LossConfig,
    ) -> Operation[TrainResult]:
        def build(slot: StepSlot) -> TrainRequest:
            return convert.train_request(
                method.request_type, self.adapter_id, slot, messages, config
            )

        def convert_reply(reply: Reply[TrainResponse]) -> TrainResult:
            return convert.to_train_result(batch, reply)

        return self._step(submit, method, build, convert_reply)

    def score(
        self,
        data: Iterable[Datum],
        loss: str,
        options: LossOptions,
        snapshot: str | None,
    ) -> Operation[TrainResult]:
        """Builds a Forward without a step number. The call changes nothing on the
        server, so a failed call may be repeated."""
        batch = convert.data_list(data)
        messages = [convert.datum_message(datum) for datum in batch]
        request = training_pb2.ForwardRequest(
            adapter_id=self.adapter_id,
            data=messages,
            loss=convert.loss_config(loss, options),
            unnumbered=True,
            snapshot=snapshot or "",
        )
        reply = yield from self.caller.call(methods.FORWARD, request)
        return convert.to_train_result(batch, reply)

    def optim_step(
        self, options: OptimOptions, *, submit: bool = False
    ) -> Operation[OptimResult]:
        config = convert.optim_config(options)

        def build(slot: StepSlot) -> training_pb2.OptimStepRequest:
            return training_pb2.OptimStepRequest(
                adapter_id=self.adapter_id,
                step=slot.number,
                epoch=slot.epoch,
                **config,
            )

        return self._step(submit, methods.OPTIM_STEP, build, convert.to_optim_result)

    def save(
        self, name: str, overwrite: bool, options: SaveOptions, *, submit: bool = False
    ) -> Operation[CheckpointInfo]:
        """Builds a save. First builds its message with step number 0 as a check, so
        options that cannot be sent use no step number."""
        convert.save_request(self.adapter_id, name, overwrite, StepSlot(0), options)

        def build(slot: StepSlot) -> adapters_pb2.SaveCheckpointRequest:
            return convert.save_request(self.adapter_id, name, overwrite, slot, options)

        def convert_reply(
            reply: Reply[adapters_pb2.SaveCheckpointResponse],
        ) -> CheckpointInfo:
            return convert.to_checkpoint_info(reply.message.checkpoint)

        return self._step(submit, methods.SAVE_CHECKPOINT, build, convert_reply)

    def load(
        self, name: str, source: str | None, weights_only: bool, durability: str | None
    ) -> Operation[AdapterInfo]:
        """Builds a load. It has no step number and no epoch: if the server has lost the
        adapter, the load makes it again for its tenant. A failed load may be repeated.
        """
        self.counter.require_idle("load")
        request = adapters_pb2.LoadCheckpointRequest(
            adapter_id=self.adapter_id,
            source_adapter_id=source or "",
            name=name,
            weights_only=weights_only,
            tenant=self.tenant,
            durability=convert.durability_name(durability),
        )
        try:
            reply = yield from self.caller.call(methods.LOAD_CHECKPOINT, request)
        except WeftError as error:
            self.counter.forget(f"a load of {self.adapter_id!r} failed ({error})")
            raise
        adapter = reply.message.adapter
        self.counter.reset(adapter.next_step, adapter.epoch)
        return convert.to_adapter_info(adapter)

    def snapshot(self, name: str, *, submit: bool = False) -> Operation[int]:
        def build(slot: StepSlot) -> adapters_pb2.PublishSnapshotRequest:
            return adapters_pb2.PublishSnapshotRequest(
                adapter_id=self.adapter_id,
                name=name,
                step=slot.number,
                epoch=slot.epoch,
            )

        def convert_reply(
            reply: Reply[adapters_pb2.PublishSnapshotResponse],
        ) -> int:
            return reply.message.version

        return self._step(submit, methods.PUBLISH_SNAPSHOT, build, convert_reply)

    def release_snapshot(self, name: str) -> Operation[None]:
        request = adapters_pb2.ReleaseSnapshotRequest(
            adapter_id=self.adapter_id, name=name
        )
        yield from self.caller.call(
            methods.RELEASE_SNAPSHOT, request, gone_is_done=True
        )

    def info(self) -> Operation[AdapterInfo]:
        request = adapters_pb2.GetAdapterRequest(adapter_id=self.adapter_id)
        reply = yield from self.caller.call(methods.GET_ADAPTER, request)
        return convert.to_adapter_info(reply.message.adapter)

    def resync(self) -> Operation[int]:
        return self.caller.resync(self.counter)

    def delete(self) -> Operation[None]:
        return ClientCore(self.caller).delete_adapter(self.adapter_id)

    def export_request(self, snapshot: str | None) -> adapters_pb2.ExportAdapterRequest:
        self.caller.require_open()
        return adapters_pb2.ExportAdapterRequest(
            adapter_id=self.adapter_id, snapshot=snapshot or ""
        )


class ClientCore:
    """Builds the operations that need no step number."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.sampler = SamplerCore(caller)

    def adapter_core(self, adapter: adapters_pb2.Adapter) -> AdapterCore:
        return AdapterCore(self.caller, adapter)

    def info(self) -> Operation[ServerInfo]:
        request = server_pb2.GetInfoRequest()
        reply = yield from self.caller.call(methods.GET_INFO, request)
        return convert.to_server_info(reply.message.info)

    def started_info(self) -> Operation[ServerInfo]:
        """Builds the info of a server that has its model. Waits while it loads it."""
        deadline = time.monotonic() + self.caller.timeout
        while True:
            info = yield from self.info()
            if info.model.vocab_size:
                return info
            if time.monotonic() > deadline:
                raise Unavailable("the server is starting")
            yield Sleep(0.5)

    def healthy(self) -> Operation[bool]:
        try:
            reply = yield from self.caller.call(
                methods.HEALTH_CHECK,
                wrappers_pb2.StringValue(),
                timeout=min(HEALTH_TIMEOUT, self.caller.timeout),
                retry=False,
            )
        except WeftError:
            return False
        return reply.message.value == methods.HEALTH_SERVING

    def drain(self) -> Operation[None]:
        request = server_pb2.DrainRequest()
        yield from self.caller.call(methods.DRAIN, request, retry=False)

    def undrain(self) -> Operation[None]:
        request = server_pb2.UndrainRequest()
        yield from self.caller.call(methods.UNDRAIN, request, retry=False)

    def create_adapter(
        self, adapter_id: str, options: AdapterOptions
    ) -> Operation[AdapterCore]:
        request = adapters_pb2.CreateAdapterRequest(
            adapter_id=adapter_id,
            config=convert.lora_config(options),
            tenant=options.get("tenant"),
            durability=convert.durability_name(options.get("durability")),
        )
        reply = yield from self.caller.call(methods.CREATE_ADAPTER, request)
        return self.adapter_core(reply.message.adapter)

    def adapter(self, adapter_id: str) -> Operation[AdapterCore]:
        request = adapters_pb2.GetAdapterRequest(adapter_id=adapter_id)
        reply = yield from self.caller.call(methods.GET_ADAPTER, request)
        return self.adapter_core(reply.message.adapter)

    def get_or_create(
        self, adapter_id: str, options: AdapterOptions
    ) -> Operation[AdapterCore]:
        """Gets the adapter, or creates it if there is none. If another client creates
        it at the same time, both clients get the same adapter."""
        # An adapter that exists must not hide values that no server takes.
        wanted = convert.lora_config(options)
        request = adapters_pb2.GetAdapterRequest(adapter_id=adapter_id)
        try:
            reply = yield from self.caller.call(methods.GET_ADAPTER, request)
        except NotFound:
            try:
                return (yield from self.create_adapter(adapter_id, options))
            except AlreadyExists:
                reply = yield from self.caller.call(methods.GET_ADAPTER, request)
        config = convert.to_adapter_info(reply.message.adapter).config
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
        return self.adapter_core(reply.message.adapter)

    def adapters(self) -> Operation[list[AdapterInfo]]:
        found: list[AdapterInfo] = []
        token = ""
        while True:
            request = adapters_pb2.ListAdaptersRequest(page_token=token)
            reply = yield from self.caller.call(methods.LIST_ADAPTERS, request)
            found += map(convert.to_adapter_info, reply.message.adapters)
            token = reply.message.next_page_token
            if not token:
                return found

    def delete_adapter(self, adapter_id: str) -> Operation[None]:
        request = adapters_pb2.DeleteAdapterRequest(adapter_id=adapter_id)
        yield from self.caller.call(methods.DELETE_ADAPTER, request, gone_is_done=True)

    def import_adapter(
        self,
        adapter_id: str,
        folder: StrPath,
        tenant: str | None,
        durability: str | None,
    ) -> Operation[AdapterCore]:
        """Builds an import. A failed import is not repeated, because its stream of
        requests is used up and the server may have received it."""
        requests = import_requests(adapter_id, folder, tenant, durability)
        reply = yield from self.caller.call(
            methods.IMPORT_ADAPTER, requests, retry=False
        )
        return self.adapter_core(reply.message.adapter)

    def checkpoints(self, adapter_id: str | None) -> Operation[list[CheckpointInfo]]:
        request = adapters_pb2.ListCheckpointsRequest(adapter_id=adapter_id or "")
        reply = yield from self.caller.call(methods.LIST_CHECKPOINTS, request)
        return [convert.to_checkpoint_info(c) for c in reply.message.checkpoints]

    def delete_checkpoint(self, adapter_id: str, name: str) -> Operation[None]:
        request = adapters_pb2.DeleteCheckpointRequest(adapter_id=adapter_id, name=name)
        yield from self.caller.call(
            methods.DELETE_CHECKPOINT, request, gone_is_done=True
        )

    def download_request(
        self, adapter_id: str, name: str
    ) -> adapters_pb2.DownloadCheckpointRequest:
        self.caller.require_open()
        return adapters_pb2.DownloadCheckpointRequest(adapter_id=adapter_id, name=name)

    def upload_checkpoint(
        self,
        adapter_id: str,
        name: str,
        folder: StrPath,
        overwrite: bool,
        tenant: str | None,
    ) -> Operation[CheckpointInfo]:
        """Builds an upload. A failed upload is not repeated, because its stream of
        requests is used up and the server may have received it."""
        requests = upload_requests(adapter_id, name, folder, overwrite, tenant)
        reply = yield from self.caller.call(
            methods.UPLOAD_CHECKPOINT, requests, retry=False
        )
        return convert.to_checkpoint_info(reply.message.checkpoint)

    def forward(
        self, data: Iterable[Datum], loss: str, options: LossOptions
    ) -> Operation[TrainResult]:
        """Builds a Forward of the base model, which has no steps."""
        batch = convert.data_list(data)
        messages = [convert.datum_message(datum) for datum in batch]
        request = convert.train_request(
            training_pb2.ForwardRequest,
            "",
            StepSlot(0),
            messages,
            convert.loss_config(loss, options),
        )
        reply = yield from self.caller.call(methods.FORWARD, request)
        return convert.to_train_result(batch, reply)
