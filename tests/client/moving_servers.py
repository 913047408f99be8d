"""Several gRPC servers with one state, of which one at a time is the owner, in the
test's own process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc

from weft import methods
from weft._proto import adapters_pb2, errors_pb2, sampling_pb2, server_pb2

Code = grpc.StatusCode
# All methods that the servers have.
METHODS = {
    one.path: one
    for one in (
        methods.CREATE_ADAPTER,
        methods.GET_ADAPTER,
        methods.GET_INFO,
        methods.DRAIN,
        methods.OPTIM_STEP,
        methods.SAMPLE_STREAM,
        methods.UPLOAD_CHECKPOINT,
        methods.DOWNLOAD_CHECKPOINT,
    )
}


def refuse(context: Any, code: grpc.StatusCode, reason: str, **values: str) -> None:
    """Ends a call as weftd does."""
    info = errors_pb2.ErrorInfo(reason=reason, domain="weft", metadata=values)
    status = errors_pb2.StatusDetails(code=code.value[0], message="refused")
    detail = status.details.add(value=info.SerializeToString())
    detail.type_url = "type.googleapis.com/google.rpc.ErrorInfo"
    details = ("grpc-status-details-bin", status.SerializeToString())
    context.set_trailing_metadata((details, ("weft-trace-id", "1")))
    context.abort(code, "refused")


class MovingServers:
    """Servers 0 to count - 1 on free ports of the loopback interface.

    owner: the index of the owner; None: there is none. beliefs: whom a server that is
    not the owner names, if that is not the owner: an address, or "" for nobody. done:
    the adapter's steps that ran, each with the server that ran it. asked: the
    server of each call so far. loses: of so many steps the answer to one is lost; 0:
    none is. uploaded: the bytes of each upload that ended.
    """

    def __init__(self, count: int) -> None:
        self.owner: int | None = 0
        self.beliefs: dict[int, str] = {}
        self.done: list[tuple[int, int]] = []
        self.asked: list[int] = []
        self.loses = 0
        self.uploaded: list[bytes] = []
        self._lock = threading.Lock()
        self._servers = []
        self.targets = []
        for index in range(count):
            server = grpc.server(
                ThreadPoolExecutor(16), handlers=[_Handler(self, index)]
            )
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            self._servers.append(server)
            self.targets.append(f"127.0.0.1:{port}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.stop(None).wait()

    def kill(self, index: int) -> None:
        self._servers[index].stop(None).wait()

    def move(self, owner: int | None) -> None:
        with self._lock:
            self.owner = owner

    def check(self, index: int, context: Any) -> None:
        """Refuses a call at a server that is not the owner."""
        with self._lock:
            self.asked.append(index)
            owner = "" if self.owner is None else self.targets[self.owner]
            if index == self.owner and index not in self.beliefs:
                return
            owner = self.beliefs.get(index, owner)
        if owner:
            refuse(context, Code.FAILED_PRECONDITION, "MOVED", address=owner)
        refuse(context, Code.UNAVAILABLE, "STANDBY")

    def step(self, index: int, number: int, context: Any) -> None:
        """Runs the next step once. Refuses one that comes too early."""
        with self._lock:
            ran = len(self.done)
            if number == ran + 1 and index == self.owner:
                self.done.append((number, index))
                if self.loses and number % self.loses == 0:
                    context.abort(Code.UNAVAILABLE, "the answer is lost")
                return
        if number > ran:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", "1"),))
            context.abort(Code.UNAVAILABLE, "an earlier step is missing")


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, servers: MovingServers, index: int) -> None:
        self._servers, self._index = servers, index

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = METHODS[details.method]

        def one(request: Any, context: Any) -> Any:
            self._servers.check(self._index, context)
            if method is methods.OPTIM_STEP:
                self._servers.step(self._index, request.step, context)
            return self._reply(method)

        def upload(requests: Iterator[Any], context: Any) -> Any:
            if not next(requests).HasField("options"):
                context.abort(Code.INVALID_ARGUMENT, "it must begin with options")
            self._servers.check(self._index, context)
            data = b"".join(request.chunk.data for request in requests)
            self._servers.uploaded.append(data)
            return self._reply(method)

        def stream(_: Any, context: Any) -> Iterator[Any]:
            self._servers.check(self._index, context)
            for token in range(3):
                yield sampling_pb2.SampleStreamResponse(tokens=[token], logprobs=[-1.0])

        handlers = {
            methods.Arity.UNARY: (grpc.unary_unary_rpc_method_handler, one),
            methods.Arity.UPLOAD: (grpc.stream_unary_rpc_method_handler, upload),
            methods.Arity.DOWNLOAD: (grpc.unary_stream_rpc_method_handler, stream),
        }
        make, behavior = handlers[method.arity]
        return make(
            behavior,
            method.request_type.FromString,
            method.response_type.SerializeToString,
        )

    def _reply(self, method: methods.Method[Any, Any]) -> Any:
        adapter = adapters_pb2.Adapter(
            adapter_id="a", next_step=len(self._servers.done) + 1, epoch=1
        )
        model = server_pb2.ModelInfo(name="toy", context_length=64, vocab_size=257)
        if method in (methods.CREATE_ADAPTER, methods.GET_ADAPTER):
            return method.response_type(adapter=adapter)
        if method is methods.GET_INFO:
            return method.response_type(info=server_pb2.ServerInfo(model=model))
        return method.response_type()
