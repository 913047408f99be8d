"""An in-process server of the Weft API over a tiny state machine.

Keeps step order, replays and refusals as training.proto describes them. A
token's log-probability is -(target + 1) / 10, so every result is predictable.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from weft import methods
from weft._proto import (
    adapters_pb2,
    sampling_pb2,
    server_pb2,
    training_pb2,
)

WIRE_FLOAT, WIRE_TOKEN = "<f4", "<u4"
EOS = 2


class Refusal(Exception):
    """Ends a call with a status."""

    def __init__(
        self, code: grpc.StatusCode, message: str, pushback_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.pushback_ms = pushback_ms


@dataclass
class FakeAdapter:
    config: Any
    last_step: int = 0
    version: int = 1
    optim_steps: int = 0
    tenant: str = ""
    snapshots: dict[str, int] = field(default_factory=dict)
    replies: dict[int, tuple[bytes, Any]] = field(default_factory=dict)


def fake_logprobs(targets: np.ndarray) -> np.ndarray:
    return (-(targets.astype("f8") + 1) / 10).astype(WIRE_FLOAT)


class FakeServer:
    """`hold`, while cleared, stops refusals and steps before their answer;
    `fail[method]` holds refusals to give; `lose_reply[method]` counts calls
    that run but whose caller sees UNAVAILABLE; `seen` logs (method, step)."""

    def __init__(self) -> None:
        self.adapters: dict[str, FakeAdapter] = {}
        self.checkpoints: dict[tuple[str, str], Any] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.fail: dict[str, deque[Refusal]] = defaultdict(deque)
        self.lose_reply: dict[str, int] = defaultdict(int)
        self.seen: list[tuple[str, int]] = []
        self.requests: list[Any] = []
        self.applied: list[tuple[str, int]] = []
        self.draining = False
        self.hold = threading.Event()
        self.hold.set()
        self._turn = threading.Condition()
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=32))
        self._server.add_generic_rpc_handlers(self._handlers())
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.target = f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hold.set()
        self._server.stop(0).wait()

    def _handlers(self) -> tuple[Any, ...]:
        found = []
        for method in vars(methods).values():
            if not isinstance(method, methods.Method):
                continue
            name = method.path.rsplit("/", 1)[1]
            found.append(self._handler(method, getattr(self, name)))
        return tuple(found)

    def _handler(self, method: Any, function: Any) -> Any:
        name = method.path.rsplit("/", 1)[1]
        streams = method.arity is methods.Arity.DOWNLOAD

        def unary(request: Any, context: Any) -> Any:
            try:
                self._before(name, request)
                reply = function(request, context)
            except Refusal as refusal:
                _abort(context, refusal)
            if self.lose_reply[name] > 0:
                self.lose_reply[name] -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "reply lost")
            return reply

        def stream(request: Any, context: Any) -> Any:
            try:
                self._before(name, request)
                yield from function(request, context)
            except Refusal as refusal:
                _abort(context, refusal)

        factory = getattr(grpc, f"{method.arity.value}_rpc_method_handler")
        handler = factory(
            stream if streams else unary,
            request_deserializer=method.request_type.FromString,
            response_serializer=method.response_type.SerializeToString,
        )
        service = method.path.split("/")[1]
        return grpc.method_handlers_generic_handler(service, {name: handler})

    def _before(self, name: str, request: Any) -> None:
        self.seen.append((name, getattr(request, "step", 0)))
        self.requests.append(request)
        if self.fail[name]:
            refusal = self.fail[name].popleft()
            self.hold.wait(20)
            raise refusal

    def _adapter(self, adapter_id: str) -> FakeAdapter:
        if adapter_id not in self.adapters:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"no adapter {adapter_id!r}")
        return self.adapters[adapter_id]

    def _in_order(self, request: Any, context: Any, run: Any) -> Any:
        """Runs a step at its turn, or replays it."""
        self.hold.wait(20)
        adapter = self._adapter(request.adapter_id)
        payload = request.SerializeToString(deterministic=True)
        with self._turn:
            step = request.step or adapter.last_step + 1
            arrived = self._turn.wait_for(
                lambda: step <= adapter.last_step + 1 or not context.is_active(),
                timeout=max(context.time_remaining() - 0.05, 0),
            )
            if not arrived or not context.is_active():
                raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "gap")
            if step <= adapter.last_step:
                stored, reply = adapter.replies.get(step, (b"", None))
                if stored != payload:
                    raise Refusal(
                        grpc.StatusCode.ALREADY_EXISTS, f"step {step} differs"
                    )
                context.set_trailing_metadata((("weft-replayed", "1"),))
                return reply
            reply = run(adapter, step)
            adapter.last_step = step
            adapter.replies[step] = (payload, reply)
            self.applied.append((type(request).__name__, step))
            self._turn.notify_all()
            return reply

    def _describe(self, adapter_id: str) -> Any:
        adapter = self._adapter(adapter_id)
        return adapters_pb2.Adapter(
            adapter_id=adapter_id,
            config=adapter.config,
            last_step=adapter.last_step,
            optim_steps=adapter.optim_steps,
            version=adapter.version,
            num_parameters=1000,
            snapshots=sorted(adapter.snapshots),
            tenant=adapter.tenant,
        )

    def _score(self, request: Any, response_type: Any, step: int) -> Any:
        response = response_type(step=step)
        total = 0.0
        for datum in request.data:
            targets = np.frombuffer(datum.targets_le, WIRE_TOKEN)
            weights = np.ones(len(targets), WIRE_FLOAT)
            if datum.weights_le:
                weights = np.frombuffer(datum.weights_le, WIRE_FLOAT)
            logprobs = np.where(weights == 0, 0, fake_logprobs(targets))
            losses = (-weights * logprobs).astype(WIRE_FLOAT)
            total += float(losses.sum())
            response.results.add(
                logprobs_le=logprobs.astype(WIRE_FLOAT).tobytes(),
                losses_le=losses.tobytes(),
                entropies_le=losses.tobytes() if request.loss.return_entropy else b"",
            )
        response.metrics["loss:sum"] = total
        return response

    def _check(self, request: Any) -> None:
        if not request.data:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "data: empty")

    # Training.

    def ForwardBackward(self, request: Any, context: Any) -> Any:
        self._check(request)
        response_type = training_pb2.ForwardBackwardResponse
        return self._in_order(
            request,
            context,
            lambda _, step: self._score(request, response_type, step),
        )

    def Forward(self, request: Any, context: Any) -> Any:
        self._check(request)
        response_type = training_pb2.ForwardResponse
        if not request.adapter_id:
            return self._score(request, response_type, 0)
        return self._in_order(
            request,
            context,
            lambda _, step: self._score(request, response_type, step),
        )

    def OptimStep(self, request: Any, context: Any) -> Any:
        def run(adapter: FakeAdapter, step: int) -> Any:
            adapter.version += 1
            adapter.optim_steps += 1
            return training_pb2.OptimStepResponse(
                grad_norm=1.5, version=adapter.version, step=step
            )

        return self._in_order(request, context, run)

    # Adapters.

    def CreateAdapter(self, request: Any, context: Any) -> Any:
        if request.adapter_id in self.adapters:
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, "id taken")
        self.adapters[request.adapter_id] = FakeAdapter(
            request.config, tenant=request.tenant
        )
        adapter = self._describe(request.adapter_id)
        return adapters_pb2.CreateAdapterResponse(adapter=adapter)

    def GetAdapter(self, request: Any, context: Any) -> Any:
        adapter = self._describe(request.adapter_id)
        return adapters_pb2.GetAdapterResponse(adapter=adapter)

    def ListAdapters(self, request: Any, context: Any) -> Any:
        """Pages of two, so that paging is exercised."""
        start = int(request.page_token or 0)
        names = sorted(self.adapters)
        page = [self._describe(name) for name in names[start : start + 2]]
        token = str(start + 2) if start + 2 < len(names) else ""
        return adapters_pb2.ListAdaptersResponse(adapters=page, next_page_token=token)

    def DeleteAdapter(self, request: Any, context: Any) -> Any:
        self._adapter(request.adapter_id)
        del self.adapters[request.adapter_id]
        return adapters_pb2.DeleteAdapterResponse()

    def SaveCheckpoint(self, request: Any, context: Any) -> Any:
        key = (request.adapter_id, request.name)

        def run(adapter: FakeAdapter, step: int) -> Any:
            if key in self.checkpoints and not request.overwrite:
                raise Refusal(grpc.StatusCode.ALREADY_EXISTS, "name taken")
            self.checkpoints[key] = adapters_pb2.Checkpoint(
                adapter_id=key[0],
                name=key[1],
                last_step=step,
                config=adapter.config,
            )
            return adapters_pb2.SaveCheckpointResponse(checkpoint=self.checkpoints[key])

        return self._in_order(request, context, run)

    def LoadCheckpoint(self, request: Any, context: Any) -> Any:
        source = request.source_adapter_id or request.adapter_id
        if (source, request.name) not in self.checkpoints:
            raise Refusal(grpc.StatusCode.NOT_FOUND, "no such checkpoint")
        checkpoint = self.checkpoints[source, request.name]
        last = 0 if request.weights_only else checkpoint.last_step
        adapter = FakeAdapter(checkpoint.config, last_step=last, tenant=request.tenant)
        self.adapters[request.adapter_id] = adapter
        return adapters_pb2.LoadCheckpointResponse(
            adapter=self._describe(request.adapter_id)
        )

    def ListCheckpoints(self, request: Any, context: Any) -> Any:
        found = [
            checkpoint
            for (adapter_id, _), checkpoint in self.checkpoints.items()
            if request.adapter_id in ("", adapter_id)
        ]
        return adapters_pb2.ListCheckpointsResponse(checkpoints=found)

    def DeleteCheckpoint(self, request: Any, context: Any) -> Any:
        if not self.checkpoints.pop((request.adapter_id, request.name), None):
            raise Refusal(grpc.StatusCode.NOT_FOUND, "no such checkpoint")
        return adapters_pb2.DeleteCheckpointResponse()

    def PublishSnapshot(self, request: Any, context: Any) -> Any:
        def run(adapter: FakeAdapter, step: int) -> Any:
            adapter.snapshots[request.name] = adapter.version
            return adapters_pb2.PublishSnapshotResponse(version=adapter.version)

        return self._in_order(request, context, run)

    def ReleaseSnapshot(self, request: Any, context: Any) -> Any:
        if not self._adapter(request.adapter_id).snapshots.pop(request.name, 0):
            raise Refusal(grpc.StatusCode.NOT_FOUND, "no such snapshot")
        return adapters_pb2.ReleaseSnapshotResponse()

    def ExportAdapter(self, request: Any, context: Any) -> Any:
        self._adapter(request.adapter_id)
        for name, data in self.files[request.adapter_id].items():
            for start in range(0, len(data), 1000):
                chunk = adapters_pb2.FileChunk(
                    name=name, data=data[start : start + 1000]
                )
                yield adapters_pb2.ExportAdapterResponse(chunk=chunk)

    def ImportAdapter(self, requests: Any, context: Any) -> Any:
        options = next(requests).options
        adapter_id = options.adapter_id
        files: dict[str, bytes] = defaultdict(bytes)
        for request in requests:
            files[request.chunk.name] += request.chunk.data
        self.files[adapter_id] = dict(files)
        self.adapters[adapter_id] = FakeAdapter(
            adapters_pb2.LoraConfig(rank=4), tenant=options.tenant
        )
        adapter = self._describe(adapter_id)
        return adapters_pb2.ImportAdapterResponse(adapter=adapter)

    # Sampling: counts up from the last prompt token.

    def _sample(self, request: Any, index: int) -> Any:
        count = request.config.max_tokens or 4
        first = request.prompt[-1] + 1 + index
        tokens = range(first, first + count)
        return sampling_pb2.Sample(
            tokens=tokens,
            logprobs=[-0.5] * count,
            finish_reason=sampling_pb2.FINISH_REASON_LENGTH,
        )

    def Sample(self, request: Any, context: Any) -> Any:
        if request.adapter_id:
            self._adapter(request.adapter_id)
        samples = [self._sample(request, i) for i in range(request.num_samples)]
        scores = [0.0] * len(request.prompt) if request.prompt_logprobs else []
        return sampling_pb2.SampleResponse(samples=samples, prompt_logprobs=scores)

    def SampleStream(self, request: Any, context: Any) -> Any:
        inner = request.request
        for index in range(inner.num_samples):
            tokens = self._sample(inner, index).tokens
            for token in tokens:
                last = token == tokens[-1]
                yield sampling_pb2.SampleStreamResponse(
                    sample_index=index,
                    tokens=[token],
                    logprobs=[-0.5],
                    finish_reason=(
                        sampling_pb2.FINISH_REASON_LENGTH
                        if last
                        else sampling_pb2.FINISH_REASON_UNSPECIFIED
                    ),
                )

    # The server.

    def GetInfo(self, request: Any, context: Any) -> Any:
        model = server_pb2.ModelInfo(
            name="toy", num_layers=2, vocab_size=64, eos_token_ids=[EOS]
        )
        return server_pb2.GetInfoResponse(
            info=server_pb2.ServerInfo(
                version="0", device="cpu", model=model, draining=self.draining
            )
        )

    def Drain(self, request: Any, context: Any) -> Any:
        self.draining = True
        return server_pb2.DrainResponse()

    def Check(self, request: Any, context: Any) -> Any:
        serving = b"\x08\x02" if self.draining else methods.HEALTH_SERVING
        return methods.RawMessage(serving)


def _abort(context: Any, refusal: Refusal) -> None:
    if refusal.pushback_ms is not None:
        hint = (("grpc-retry-pushback-ms", str(refusal.pushback_ms)),)
        context.set_trailing_metadata(hint)
    context.abort(refusal.code, refusal.message)
