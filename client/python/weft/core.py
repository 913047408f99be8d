"""Builds the steps of one adapter, which its handle and the handle's `submit` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from weft import convert, methods
from weft._proto import adapters_pb2, training_pb2
from weft.convert import TrainRequest, TrainResponse
from weft.datum import Datum
from weft.methods import Method, RequestT, ResponseT
from weft.operations import Caller, Operation, Reply
from weft.steps import StepCounter, StepSlot
from weft.types import (
    CheckpointInfo,
    LossOptions,
    OptimOptions,
    OptimResult,
    SaveOptions,
    TrainResult,
)

T = TypeVar("T")


class StepCore:
    """Builds the operations that are steps, and numbers them.

    submits: a step takes its number when it is built, as Caller.submit_step does.
    """

    def __init__(self, caller: Caller, counter: StepCounter, submits: bool) -> None:
        self._caller = caller
        self._counter = counter
        self._adapter_id = counter.adapter_id
        self._submits = submits

    def _step(
        self,
        method: Method[RequestT, ResponseT],
        build: Callable[[StepSlot], RequestT],
        convert_reply: Callable[[Reply[ResponseT]], T],
    ) -> Operation[T]:
        make = self._caller.submit_step if self._submits else self._caller.step
        return make(self._counter, method, build, convert_reply)

    def train(
        self,
        method: Method[TrainRequest, TrainResponse],
        data: Iterable[Datum],
        loss: str,
        options: LossOptions,
    ) -> Operation[TrainResult]:
        """Builds a ForwardBackward or a Forward. Converts the data before it takes a
        step number, so data that cannot be sent uses no step number."""
        batch = convert.data_list(data)
        messages = [convert.datum_message(datum) for datum in batch]
        config = convert.loss_config(loss, options)

        def build(slot: StepSlot) -> TrainRequest:
            return method.request_type(
                adapter_id=self._adapter_id,
                step=slot.number,
                epoch=slot.epoch,
                data=messages,
                loss=config,
            )

        def convert_reply(reply: Reply[TrainResponse]) -> TrainResult:
            return convert.to_train_result(batch, reply)

        return self._step(method, build, convert_reply)

    def optim_step(self, options: OptimOptions) -> Operation[OptimResult]:
        return self._optim_step(convert.optim_config(options))

    def zero_grad(self) -> Operation[OptimResult]:
        return self._optim_step({"discard": True})

    def _optim_step(self, config: dict[str, Any]) -> Operation[OptimResult]:
        def build(slot: StepSlot) -> training_pb2.OptimStepRequest:
            return training_pb2.OptimStepRequest(
                adapter_id=self._adapter_id,
                step=slot.number,
                epoch=slot.epoch,
                **config,
            )

        return self._step(methods.OPTIM_STEP, build, convert.to_optim_result)

    def save(
        self, name: str, overwrite: bool, options: SaveOptions
    ) -> Operation[CheckpointInfo]:
        """Builds a save. First builds its message with step number 0 as a check, so
        options that cannot be sent use no step number."""

        def build(slot: StepSlot) -> adapters_pb2.SaveCheckpointRequest:
            return convert.save_request(
                self._adapter_id, name, overwrite, slot, options
            )

        def convert_reply(
            reply: Reply[adapters_pb2.SaveCheckpointResponse],
        ) -> CheckpointInfo:
            return convert.to_checkpoint_info(reply.message.checkpoint)

        build(StepSlot(0))
        return self._step(methods.SAVE_CHECKPOINT, build, convert_reply)

    def snapshot(self, name: str) -> Operation[int]:
        def build(slot: StepSlot) -> adapters_pb2.PublishSnapshotRequest:
            return adapters_pb2.PublishSnapshotRequest(
                adapter_id=self._adapter_id,
                name=name,
                step=slot.number,
                epoch=slot.epoch,
            )

        def convert_reply(reply: Reply[adapters_pb2.PublishSnapshotResponse]) -> int:
            return reply.message.version

        return self._step(methods.PUBLISH_SNAPSHOT, build, convert_reply)
